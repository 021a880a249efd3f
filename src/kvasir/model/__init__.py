"""What a model is on disk and in memory: references, the store, weights, vocabulary, sampler chains.

Knows files and the native core; knows nothing of scheduling, caching or chat. Nothing is imported here, so that a
command which only lists models loads no native code.
"""
