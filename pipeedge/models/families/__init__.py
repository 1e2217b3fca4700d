"""The model families: how the blocks of each are cut into layers."""
