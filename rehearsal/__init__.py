# SPDX-License-Identifier: GPL-3.0-or-later
"""The rehearsal: a fleet of containers with systemd that stands in for a site, and the main job run on it."""
