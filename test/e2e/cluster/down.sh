#!/usr/bin/env bash
# Ends a cluster, also one that is half started, and removes all that it left,
# its state folder too (KEEP=1 keeps it, for the logs).
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/cgroups.sh"
find_state
[ -f "$state/$marker" ] || fail "$state is not a cluster's: there is no $marker in it"
PATH=$PATH:/usr/sbin:/sbin

# With the first process of a pid namespace go all others, and with them their mounts
# and network. It and its parent are the only ones that have the script's name and the
# folder's; the script may be another checkout's.
killed=()
for proc in /proc/[0-9]*; do
	if runs "$proc" control-plane.sh && kill -KILL "${proc#/proc/}" 2>/dev/null; then killed+=("$proc"); fi
done

# ended: whether they are gone, or zombies, which have nothing any more.
ended() {
	local proc
	for proc in "${killed[@]}"; do
		if grep -qs $'^State:\t[^XZ]' "$proc/status"; then return 1; fi
	done
}

for _ in $(seq 100); do
	if ended && remove_cgroups; then break; fi
	sleep 0.1
done
ended || fail "processes that were killed are left: ${killed[*]}"
remove_cgroups || fail "cgroups named $cgroup are left"

# find_loops sets loops to the cluster's loop devices, which belong to the machine: by
# their files, as the paths are those of a namespace that has ended.
find_loops() {
	local device inodes inode table found name number back file inside
	local -A ours=() limited=()
	device=$(stat -c %Hd:%Ld "$state")
	inodes=$(find "$state" -xdev -type f -printf '%i\n')
	for inode in $inodes; do ours["$device $inode"]=1; done
	# A btrfs has another number than its device.
	for file in "$state"/n*/limited; do
		if read -r inode inside 2>/dev/null <"$file"; then limited["$device $inode"]=$inside; fi
	done
	table=$(losetup -l -n --raw -O NAME,MAJ:MIN,BACK-MAJ:MIN,BACK-INO,BACK-FILE | sed 's/\\x20/ /g')
	loops=()
	# Once more after each find: a pool may be on a file system on one, and the kubelet
	# has devices of its own whose file is the node in /dev of a volume's.
	found=1
	while [ -n "$found" ]; do
		found=
		while read -r name number back inode file; do
			if [ -z "$name" ] || [ -n "${ours[$number]:-}" ]; then continue; fi
			# A file that has been deleted is known by the path in its mount, which is lost.
			# A longer path is that of a mount still there, of somebody else's.
			if [ -n "${ours[$back]:-}${ours[$back $inode]:-}" ] ||
				[[ $back == "$device" && $file =~ ^(/trivet)?/pools/.*\(deleted\)$ ]]; then
				ours["$number"]=1
				ours["${limited[$back $inode]:-$number}"]=1
				ours["$(stat -c '%Hd:%Ld %i' "$name")"]=1
				# The one on top first.
				loops=("$name" "${loops[@]}")
				found=1
			fi
		done <<<"$table"
	done
}
find_loops

# remove_nodes LOOP: the driver's device nodes of a disk's partitions.
remove_nodes() {
	local number node
	while read -r number node; do
		if grep -qsx "$number" "/sys/block/${1#/dev/}"/*/dev; then rm -f "$node"; fi
	done < <(stat -c '%Hr:%Lr %n' /dev/trivet/* 2>/dev/null)
}
for loop in "${loops[@]}"; do
	remove_nodes "$loop"
	losetup -d "$loop" 2>/dev/null || true
done
rm -f "/dev/$cgroup"

! grep -F " $state/" /proc/self/mountinfo || fail "mounts are left"
[ -n "${KEEP:-}" ] || rm -rf --one-file-system -- "$state"
