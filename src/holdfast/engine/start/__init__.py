"""Starting an engine: find and load a model, choose the sizes that fit, put the parts together."""
