# SPDX-License-Identifier: GPL-3.0-or-later
"""What a client can see of an engine: asked of vLLM once and kept as data, and asked of the stand-in at each test."""
