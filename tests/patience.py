"""How long tests wait for what is sure to come, on however slow a machine."""

#: Seconds until a test gives up. Only one that fails takes so long.
LIMIT = 180
