"""The stages, one file each: docstring, kernel, specs, launcher."""
