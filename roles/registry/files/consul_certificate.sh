#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
# Makes the certificate and the key of a host of Consul, unless there is one that is still good for what the host is:
# consul_certificate.sh FOLDER HOST NAME ADDRESS, in a folder with the authority's ca.pem and ca.key. Prints "made" if so.
set -eu
umask 077
folder=$1 host=$2 name=$3 address=$4
certificate=$folder/$host.pem
key=$folder/$host.key

names="DNS:$name, DNS:localhost, IP:127.0.0.1, IP:$address"
if [ -s "$key" ] && [ "$(cat "$folder/$host.names" 2>/dev/null || true)" = "$names" ] &&
  openssl x509 -in "$certificate" -noout -checkend $((60 * 86400)) >/dev/null 2>&1 &&
  openssl verify -CAfile "$folder/ca.pem" "$certificate" >/dev/null 2>&1; then
  exit 0
fi
work=$(mktemp -d "$folder/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$name" \
  -keyout "$work/key" -out "$work/request" 2>/dev/null
cat >"$work/extensions" <<END
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $names
END
openssl x509 -req -in "$work/request" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -days 730 \
  -set_serial "0x$(openssl rand -hex 16)" -extfile "$work/extensions" -out "$work/certificate" 2>/dev/null
printf '%s' "$names" >"$work/names"
mv "$work/key" "$key"
mv "$work/certificate" "$certificate"
mv "$work/names" "$folder/$host.names"
echo made
