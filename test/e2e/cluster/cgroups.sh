# shellcheck shell=bash disable=SC2154
# Sourced. Manages the cluster's cgroups. The kubelet needs its root cgroup, $cgroup/nN,
# in every hierarchy of cgroup v1, including name=systemd. runc also creates cgroups in
# the unified hierarchy.

cgroup_hierarchies() {
	if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
		echo /sys/fs/cgroup
	else
		find /sys/fs/cgroup -mindepth 1 -maxdepth 1 -type d
	fi
}

# delegate CGROUP: enables the missing controllers for the children of a v2 cgroup. A
# cgroup must have a controller before it can enable it, so begin with the root. The kubelet
# needs hugetlb if the kernel has it.
delegate() {
	local controller missing=()
	for controller in cpu cpuset hugetlb io memory pids; do
		grep -qw "$controller" "$1/cgroup.controllers" || continue
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
			# In a new cgroup of v1 these files are empty, and no process can enter the cgroup.
			for f in cpuset.cpus cpuset.mems; do
				if [ -e "$dir/$f" ] && [ -e "$hierarchy/tasks" ]; then cat "$hierarchy/$f" >"$dir/$f"; fi
			done
			if [ -e "$dir/cgroup.subtree_control" ]; then delegate "$dir"; fi
		done
	done
}

# remove_cgroups: fails while killed processes are still in one of the cgroups.
remove_cgroups() {
	local hierarchy left=0
	for hierarchy in $(cgroup_hierarchies); do
		[ -d "$hierarchy/$cgroup" ] || continue
		find "$hierarchy/$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || left=1
	done
	return $left
}
