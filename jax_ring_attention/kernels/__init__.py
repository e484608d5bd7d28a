"""Chunk kernels: implementations of the contract in `contract.py`. They never import each other."""
