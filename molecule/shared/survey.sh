#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
# Prints what there is on a host, a line each: packages of dpkg and of rpm, users, groups, unit files, running services, files
# with owner, mode and content, and the kernel that boots. Two surveys differ only when something was done to the host in between.
set -eu
export LC_ALL=C

# Passed over: the books of the package managers and of ucf (packages are listed by themselves), systemd's seeds and stamps,
# and the samples of a Prometheus that runs; the linker's cache, which tells in which order packages came; useradd's lock and
# copies; /etc/hosts and the rehearsal's own state, which a reboot changes. The folder /var/lib/ringmaster, which stays, but
# not what is in it, which is the roles' records.
walk() {
  find /etc /opt /srv /usr/local /usr/lib/systemd /var/lib \
    \( -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/lib/dnf -o -path /var/lib/rpm -o -path /var/lib/ucf \
    -o -path /var/lib/systemd \
    -o -path '/var/lib/prometheus/metrics2/*' \
    -o -path /etc/ld.so.cache -o -path /etc/.pwd.lock -o -path '/etc/*-' -o -path /etc/hosts \
    -o -path /var/lib/ringmaster-rehearsal \) -prune -o -path /var/lib/ringmaster -o "$@"
}

dpkg-query --show --showformat 'package ${binary:Package} ${Version} ${db:Status-Want} ${db:Status-Status}\n'
if command -v rpm > /dev/null; then rpm --query --all | sort | sed 's/^/rpm /'; fi
getent passwd | sed 's/^/user /'
getent group | sed 's/^/group /'
systemctl list-unit-files --no-legend --no-pager | sed 's/^/unit /; s/  */ /g'
systemctl list-units --type service --state running --plain --no-legend --no-pager | sed 's/^/running /; s/  */ /g' |
  grep -v '^running user@'
walk -printf 'file %p %M %u:%g %l\n'
walk -type f -exec sha256sum {} + | sed 's/^/content /'
if command -v grubby > /dev/null; then echo "default $(grubby --default-kernel)"; fi

# What the records of the driver stack say, without their times and boots.
for record in /var/lib/ringmaster/packages/*/generations.json; do
  [ ! -e "$record" ] || python3 - "$record" << 'END'
import json, sys
for each in json.load(open(sys.argv[1]))["generations"]:
    head = f"generation {sys.argv[1].split('/')[-2]} {each['number']} {each['state']}"
    print(head, each["profile"], *each["held"])
    for entry in each["entries"]:
        print(head, entry["name"], entry["before"], entry["after"], entry["file"])
END
done
