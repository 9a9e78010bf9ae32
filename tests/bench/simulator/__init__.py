# SPDX-License-Identifier: GPL-3.0-or-later
"""A discrete-event model of engines, HAProxy and clients, in which the scheduler's core and other policies are
compared."""
