"""The workbench measures the library and reports on it. The library never imports it."""
