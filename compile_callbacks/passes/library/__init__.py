"""The library's own graph pass. The first launch of its kernel imports Triton."""
