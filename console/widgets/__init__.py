"""Panels: one pure painter a module (view in, lines out), and ``panel``, the Textual widget that
shows them.
"""
