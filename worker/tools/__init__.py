"""Programs of their own: the reference run, the export, a look at a folder."""
