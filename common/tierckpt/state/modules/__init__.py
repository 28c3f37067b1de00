"""Modules: the state that modules save beyond parameters and buffers."""
