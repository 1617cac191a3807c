"""The graph passes that come with the library. Triton is imported when a kernel is launched."""
