"""What is compiled once and kept: files of artifacts, their keys, and who may be trusted with them."""
