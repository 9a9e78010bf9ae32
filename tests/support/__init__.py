# SPDX-License-Identifier: GPL-3.0-or-later
"""What end-to-end tests and the bench share."""
