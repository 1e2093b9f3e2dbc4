#!/bin/sh
# Uses a pod's volume from a shell script. Run it as root, while trivet driver and trivet volume-manager
# are running (see the two services).
set -eu
install -D -m 0644 "$(dirname "$0")/web.yaml" /etc/trivet/manifests/web.yaml
paths=$(trivet volume-manager wait --timeout 1m web)
data=$(echo "$paths" | awk '$1 == "data" {print $2}')
date >> "$data/log"
cat "$data/log"
