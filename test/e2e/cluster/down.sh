#!/usr/bin/env bash
# Ends a cluster, even one that did not start completely, and removes its cgroups, loop
# devices and state directory. KEEP=1 keeps the state directory with the logs.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/cgroups.sh"
find_state
[ -f "$state/$marker" ] || fail "$state is not the state directory of a cluster: it has no file $marker"
PATH=$PATH:/usr/sbin:/sbin

# When the first process of the pid namespace is killed, the kernel kills all others and
# removes their mounts and network. Only the first process and its parent have the name of
# the script and the state directory in their command lines. The path of the script may
# belong to another checkout.
killed=()
for proc in /proc/[0-9]*; do
	if runs "$proc" control-plane.sh && kill -KILL "${proc#/proc/}" 2>/dev/null; then killed+=("$proc"); fi
done

# ended: whether the killed processes have ended. Zombies hold no mounts any more.
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
ended || fail "killed processes have not ended: ${killed[*]}"
remove_cgroups || fail "the cgroups $cgroup cannot be removed"

# find_loops sets loops to the loop devices of the cluster. It finds them by the inodes of
# their backing files, because the paths are those of a mount namespace that has ended.
find_loops() {
	local device inodes inode table found name number back file inside
	local -A ours=() limited=()
	device=$(stat -c %Hd:%Ld "$state")
	inodes=$(find "$state" -xdev -type f -printf '%i\n')
	for inode in $inodes; do ours["$device $inode"]=1; done
	# A btrfs has a different device number than its loop device.
	for file in "$state"/n*/limited; do
		if read -r inode inside 2>/dev/null <"$file"; then limited["$device $inode"]=$inside; fi
	done
	table=$(losetup -l -n --raw -O NAME,MAJ:MIN,BACK-MAJ:MIN,BACK-INO,BACK-FILE | sed 's/\\x20/ /g')
	loops=()
	# Repeat while devices are found: a found device may contain the filesystem of a pool, or
	# be the backing file of a device that the kubelet has created for a block volume.
	found=1
	while [ -n "$found" ]; do
		found=
		while read -r name number back inode file; do
			if [ -z "$name" ] || [ -n "${ours[$number]:-}" ]; then continue; fi
			# A deleted file has no inode to compare. It is identified by its path, which is
			# relative to a mount that no longer exists. Longer paths belong to existing
			# mounts of other programs.
			if [ -n "${ours[$back]:-}${ours[$back $inode]:-}" ] ||
				[[ $back == "$device" && $file =~ ^(/trivet)?/pools/.*\(deleted\)$ ]]; then
				ours["$number"]=1
				ours["${limited[$back $inode]:-$number}"]=1
				ours["$(stat -c '%Hd:%Ld %i' "$name")"]=1
				# Devices on top come first, because they must be freed first.
				loops=("$name" "${loops[@]}")
				found=1
			fi
		done <<<"$table"
	done
}
find_loops

# remove_nodes LOOP: removes the device nodes that the driver has created for the disk's
# partitions.
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
