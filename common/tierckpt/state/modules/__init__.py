"""Modules: what modules save beyond parameters and buffers."""
