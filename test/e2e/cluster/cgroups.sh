# shellcheck shell=bash disable=SC2154
# Sourced. The cluster's cgroups: the kubelet wants its root, $cgroup/nN, to exist in
# every hierarchy of cgroup v1, name=systemd too. Beside those, runc makes one in
# the unified hierarchy.

cgroup_hierarchies() {
	if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
		echo /sys/fs/cgroup
	else
		find /sys/fs/cgroup -mindepth 1 -maxdepth 1 -type d
	fi
}

# delegate CGROUP: of v2, lets those in it have the controllers that they lack. What
# one is to hand on it must have been given first, from the root on.
delegate() {
	local controller missing=()
	for controller in cpu cpuset io memory pids; do
		grep -qw "$controller" "$1/cgroup.subtree_control" || missing+=("+$controller")
	done
	[ ${#missing[@]} = 0 ] || echo "${missing[*]}" >"$1/cgroup.subtree_control"
}

make_cgroups() {
	local hierarchy dir f
	for hierarchy in $(cgroup_hierarchies); do
		[ "${hierarchy##*/}" != unified ] || continue
		if [ -e "$hierarchy/cgroup.subtree_control" ]; then delegate "$hierarchy"; fi
		for dir in "$hierarchy/$cgroup" $(seq -f "$hierarchy/$cgroup/n%.0f" "$nodes"); do
			mkdir -p "$dir"
			# Empty in a new cgroup of v1, and no process can enter it then.
			for f in cpuset.cpus cpuset.mems; do
				if [ -e "$dir/$f" ] && [ -e "$hierarchy/tasks" ]; then cat "$hierarchy/$f" >"$dir/$f"; fi
			done
			if [ -e "$dir/cgroup.subtree_control" ]; then delegate "$dir"; fi
		done
	done
}

# remove_cgroups: false while processes that have been killed are still in one.
remove_cgroups() {
	local hierarchy left=0
	for hierarchy in $(cgroup_hierarchies); do
		[ -d "$hierarchy/$cgroup" ] || continue
		find "$hierarchy/$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || left=1
	done
	return $left
}
