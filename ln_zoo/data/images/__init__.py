"""Images, with labels or binarized."""
