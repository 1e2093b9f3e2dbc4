#!/usr/bin/env bash
# Creates a btrfs and disks for each node of a running cluster, on sparse files. The btrfs
# limits directories if the kernel has simple quotas. Writes STATE/local.yaml with the
# values of the chart for them. The values set another state directory, because some tests
# move the default one from node to node.
set -euo pipefail
. "$(dirname "$0")/env.sh"
find_state
PATH=$PATH:/usr/sbin:/sbin
place=/var/lib/trivet-e2e

# limit_directories DIRECTORY: enables simple quotas with BTRFS_IOC_QUOTA_CTL and
# BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA (uapi/linux/btrfs.h), because the btrfs-progs of
# Debian 12 do not support them.
limit_directories() {
	IN=$n "$here/in.sh" perl -e '$enable = pack("QQ", 4, 0); open(DIR, "<", $ARGV[0]) && ioctl(DIR, 0xc0109428, $enable) or die "$!\n"' "$1" ||
		echo "node $n: directories are not limited, because this kernel has no simple quotas (they need Linux 6.7)"
}

# storage NODE: creates the btrfs and the disks of a node.
storage() {
	local n=$1 lib=$state/n$1/lib/trivet-e2e i
	mkdir -p "$lib"/{limited,disks,images}
	truncate -s 50G "$lib/images/limited"
	mkfs.btrfs -q "$lib/images/limited" >/dev/null
	IN=$n "$here/in.sh" mount -o loop,noatime "$place/images/limited" "$place/limited"
	limit_directories "$place/limited"
	echo "$(stat -c %i "$lib/images/limited") $(IN=$n "$here/in.sh" stat -c %Hd:%Ld "$place/limited")" >"$state/n$n/limited"
	for i in $(seq 12); do
		truncate -s 2G "$lib/images/$i"
		ln -s "$(losetup --find --show --partscan "$lib/images/$i")" "$lib/disks/$i"
	done
}

debian_packages mkfs.btrfs:btrfs-progs nsenter:util-linux perl:perl-base
for dir in "$state"/n[1-9]; do storage "${dir##*/n}"; done
# All nodes share the devices of the machine. On each node, this link leads to the links to
# the node's disks in its /var/lib.
ln -s "$place/disks" "/dev/$cgroup"
cat >"$state/local.yaml" <<-E
	stateDir: $place-state
	ephemeral: {enabled: true, memory: 64Mi}
	pools:
	  default:
	  limited:
	    directory: {path: $place/limited}
	    requireMount: true
	    ephemeral: true
	    storageClasses:
	      - {name: trivet-loop, backend: loop, fsType: ext4}
	      - {name: trivet-directories, backend: local}
	  disks:
	    disks: {match: ["/dev/$cgroup/*"]}
	    storageClasses:
	      - {name: trivet-disks, fsType: ext4}
	      - {name: trivet-disks-xfs, fsType: xfs}
	      - {name: trivet-disks-btrfs, fsType: btrfs}
E
