"""Generating text with the stages and ends of a decoder, without processes.

pages      which pages of the cache each sequence has
steps      which rows the next step has
loop       all layers in one process
"""
