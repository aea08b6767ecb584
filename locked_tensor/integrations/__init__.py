"""Other people's engines on this one: `integrations.deepspeed`, `integrations.dcp`. Imported by name."""
