"""The workbench: what measures the library and tells of it. The library never imports it."""
