"""Builds the documentation: the pages of this folder and the API reference, and checks every link in them.

    python docs/build.py build/docs
"""

from __future__ import annotations

import ast
import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pdoc
from markdown2 import Markdown

import locked_tensor as lt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = ["tables", "fenced-code-blocks", "header-ids", "cuddled-lists"]
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body {{ max-width: 60em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 sans-serif }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ccc; padding: .2em .6em; vertical-align: top }}
pre {{ background: #f5f5f5; padding: .8em; overflow: auto }}</style></head>
<body><nav>{menu}</nav>{body}</body></html>
"""


class Links(HTMLParser):
    """What a page points to, and what can be pointed to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        self.targets += [value for name in ("href", "src") if (value := found.get(name))]


def build(out: Path) -> None:
    """Writes everything into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    document_compiled_methods()
    pdoc.render.configure(docformat="google", footer_text="locked_tensor", show_source=False)
    pdoc.pdoc("locked_tensor", "!locked_tensor.cli", output_directory=out)
    unlink_what_is_not_shown(out)
    (out / "index.html").unlink()  # pdoc's own, which only leads on to the reference
    names = {"README": "index"}
    titles = {page: page.read_text().splitlines()[0].lstrip("# ") for page in PAGES}
    menu = " | ".join(
        [f'<a href="{names.get(page.stem, page.stem)}.html">{html.escape(titles[page])}</a>' for page in PAGES]
        + ['<a href="locked_tensor.html">API reference</a>']
    )
    for page in PAGES:
        body = Markdown(extras=EXTRAS).convert(page.read_text())
        target = out / f"{names.get(page.stem, page.stem)}.html"
        target.write_text(PAGE.format(title=html.escape(titles[page]), menu=menu, body=body))


def broken_links(out: Path) -> list[str]:
    """Each link of a page in `out` to a file or anchor that is not there; links to other sites are not followed."""
    pages: dict[Path, Links] = {}
    for path in out.rglob("*.html"):
        pages[path] = Links()
        pages[path].feed(path.read_text())
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_there = file.exists() and (
                not parts.fragment or file not in pages or unquote(parts.fragment) in pages[file].anchors
            )
            if not is_there:
                broken.append(f"{path.relative_to(out)}: {target}")
    return broken


def document_compiled_methods() -> None:
    """Gives `AioHandle` its compiled methods with the stubs' signatures: in the extension they have no names for
    their types, and pdoc shows nothing that is inherited from a class that is not public."""
    stubs = Path(lt.__file__).with_name("_C.pyi")
    tree = ast.parse(stubs.read_text())
    scope: dict[str, object] = {"__name__": "locked_tensor"}
    exec(compile(tree, str(stubs), "exec"), scope)
    for name, member in vars(scope["AioHandleBase"]).items():
        if not name.startswith("_") and name not in vars(lt.AioHandle):
            _, _, told = (getattr(lt._C.AioHandleBase, name).__doc__ or "").partition("\n\n")
            if told.strip() and callable(member):
                member.__doc__ = told.strip()
            setattr(lt.AioHandle, name, member)


def unlink_what_is_not_shown(out: Path) -> None:
    """pdoc makes links of all names that a class has, of those too that it inherits and so does not show."""
    for path in out.rglob("*.html"):
        page = Links()
        text = path.read_text()
        page.feed(text)
        for target in {each for each in page.targets if each.startswith("#") and each[1:] not in page.anchors}:
            text = re.sub(rf'<a href="{re.escape(target)}">(.*?)</a>', r"\1", text)
        path.write_text(text)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    build(folder)
    sys.exit("\n".join(broken_links(folder)) or None)
