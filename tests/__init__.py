"""Tests of ckpt_tool: the folders mirror the package."""
