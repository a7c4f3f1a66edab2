"""Version of the package, read by the build too."""

__version__ = "0.2.0"
