"""Decides which bytes go where: the overlap of two manifests, cut into tiles. Moves nothing, opens nothing."""
