#!/usr/bin/env bash
# Gives each node of a running cluster what volumes of backend local want: a filesystem
# that limits directories, where the kernel can, and disks of its own. All sparse files
# on the machine's disk. STATE/local.yaml are the chart's values for them, with a state
# directory of their own: the tests move the other from node to node.
set -euo pipefail
. "$(dirname "$0")/env.sh"
find_state
PATH=$PATH:/usr/sbin:/sbin
place=/var/lib/trivet-e2e

# limit_directories FOLDER: simple quotas, which the btrfs-progs of Debian 12 do not know.
# BTRFS_IOC_QUOTA_CTL with BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA, uapi/linux/btrfs.h.
limit_directories() {
	IN=$n "$here/in.sh" perl -e '$enable = pack("QQ", 4, 0); open(DIR, "<", $ARGV[0]) && ioctl(DIR, 0xc0109428, $enable) or die "$!\n"' "$1" ||
		echo "node $n: this kernel has no simple quotas (Linux 6.7): its directories are without a limit"
}

# storage NODE
storage() {
	local n=$1 lib=$state/n$1/lib/trivet-e2e i
	mkdir -p "$lib"/{limited,disks,images}
	truncate -s 20G "$lib/images/limited"
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
# Devices are the machine's. Which of them are a node's, the link says in its /var/lib.
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
