"""Figures as pictures, where matplotlib is installed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from locked_tensor.cli.arguments import new_file

if TYPE_CHECKING:
    from locked_tensor.cli.bench import Figure


def plot_path(text: str) -> Path:
    """The type of a `--plot` option: refuses before the work, not after it, where matplotlib is missing."""
    try:
        _pyplot()
    except ImportError as error:
        raise argparse.ArgumentTypeError(
            f"a plot needs matplotlib: pip install matplotlib ({error})"
        ) from error
    return new_file(text)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    from matplotlib import pyplot

    return pyplot


def plot_heat_maps(
    path: Path,
    maps: Mapping[str, Mapping[tuple[int, int], float]],
    block_sizes: Sequence[int],
    queue_depths: Sequence[int],
) -> None:
    """A panel for each title: GB/s by block size and depth; what was not tried stays blank."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, len(maps), figsize=(6 * len(maps), 4.5), squeeze=False)
    for panel, (title, cells) in zip(panels[0], maps.items()):
        rows = [[cells.get((block, depth), float("nan")) / 1e9 for depth in queue_depths] for block in block_sizes]
        image = panel.imshow(rows, origin="lower", aspect="auto", cmap="viridis")
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                if value == value:  # not NaN
                    panel.text(x, y, f"{value:.2f}", ha="center", va="center", color="white", fontsize=8)
        panel.set_xticks(range(len(queue_depths)), [str(depth) for depth in queue_depths])
        panel.set_yticks(range(len(block_sizes)), [f"{block >> 10}" for block in block_sizes])
        panel.set(title=title, xlabel="queue depth", ylabel="block size, KiB")
        figure.colorbar(image, ax=panel, label="GB/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_figures(path: Path, title: str, figures: Sequence[Figure]) -> None:
    """A panel of bars for each unit; the lines on them reach from the least to the most of all rounds."""
    pyplot = _pyplot()
    units = list(dict.fromkeys(figure.unit for figure in figures))
    heights = [1 + sum(figure.unit == unit for figure in figures) for unit in units]
    drawing, panels = pyplot.subplots(
        len(units), 1, figsize=(10, 1.2 + 0.3 * sum(heights)), squeeze=False, height_ratios=heights
    )
    for unit, (panel,) in zip(units, panels):
        shown = [figure for figure in figures if figure.unit == unit][::-1]  # barh begins at the bottom
        values = [figure.value for figure in shown]
        panel.barh([figure.what for figure in shown], values, height=0.7)
        ranged = [(row, figure) for row, figure in enumerate(shown) if figure.low is not None]
        panel.hlines(
            [row for row, _ in ranged],
            [figure.low for _, figure in ranged],
            [figure.high for _, figure in ranged],
            color="black",
            linewidth=1.2,
        )
        if unit == "x":
            panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_xlabel({"x": "ratio", "": "share"}.get(unit, unit))
        panel.tick_params(labelsize=7)
    panels[0][0].set_title(title)
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
