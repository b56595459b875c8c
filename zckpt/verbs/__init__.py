"""What zckpt does, one module a verb; each tells its whole story on about a screen.

A package of their own, because the functions carry the modules' names: `zckpt.verify` is the
function, `zckpt.verbs.verify` the module.
"""
