"""Files that somebody else wrote: models, tokenizers, chat templates, data. Each reader bounds what such a file may cost before it pays.

Holds: no code that comes with a file runs; no file makes this process wait for ever, or take memory out of proportion to the file's size.
"""
