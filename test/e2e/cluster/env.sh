# shellcheck shell=bash disable=SC2034
# Sourced by the scripts here: where things are and what they are called.
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
cache=${TRIVET_E2E_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/trivet-e2e}
bin=$cache/bin
images=$cache/images
# In each state folder: down.sh removes no other.
marker=trivet-e2e-cluster

node_name() { echo "node$1"; }
node_ip() { echo "10.111.0.$1"; }

fail() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# find_state sets state to the cluster's folder: the one in TRIVET_E2E_STATE, else
# the only one that the caller's up.sh has made.
find_state() {
	local dir found=()
	state=${TRIVET_E2E_STATE:-}
	if [ -z "$state" ]; then
		for dir in /tmp/trivet-e2e.*; do
			# Anybody can make a folder there, or a link.
			if [ -d "$dir" ] && [ ! -L "$dir" ] && [ -O "$dir" ]; then found+=("$dir"); fi
		done
		[ ${#found[@]} -gt 0 ] || fail "there is no cluster"
		[ ${#found[@]} = 1 ] || fail "several clusters, say which: TRIVET_E2E_STATE=${found[*]}"
		state=${found[0]}
	fi
	state=$(readlink -m "$state")
	# Directories in every cgroup hierarchy of the machine: one name per cluster.
	cgroup=trivet-e2e-$(sha256sum <<<"$state" | cut -c1-8)
	export TRIVET_E2E_STATE=$state
}

# runs PROCESS SCRIPT: whether the process, a folder of a /proc, runs that script for
# the cluster in $state. A number alone may be any process's by now.
runs() {
	local words i
	mapfile -d '' -t words 2>/dev/null <"$1/cmdline" || return 1
	for i in "${!words[@]}"; do
		if [[ ${words[i]} == */$2 && ${words[i + 1]:-} == "$state" ]]; then return 0; fi
	done
	return 1
}

# debian_packages installs the packages whose programs (named before the colon)
# are missing.
debian_packages() {
	local p missing=()
	for p; do PATH=$PATH:/usr/sbin:/sbin command -v "${p%%:*}" >/dev/null || missing+=("${p#*:}"); done
	[ ${#missing[@]} -gt 0 ] || return 0
	echo "installing Debian packages: ${missing[*]}"
	apt-get -qq update
	DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "${missing[@]}" >/dev/null
}

# once NAME FUNCTION INPUT...: runs the function unless it has succeeded before
# with the same text, Go release and content of the inputs (files or directories).
once() {
	# The function sees these: names that it does not use.
	local once_part=$1 once_function=$2 once_hash once_start=$SECONDS
	shift 2
	once_hash=$({
		declare -f "$once_function"
		go env GOVERSION GOARCH
		find "$@" -type f -print0 | sort -z | xargs -0 sha256sum | sed "s| $here/| |"
	} | sha256sum | cut -c1-16)
	if [ "$(cat "$cache/stamps/$once_part" 2>/dev/null)" = "$once_hash" ]; then return; fi
	mkdir -p "$cache/stamps"
	rm -f "$cache/stamps/$once_part"
	echo "building $once_part"
	"$once_function"
	echo "$once_hash" >"$cache/stamps/$once_part"
	echo "built $once_part in $((SECONDS - once_start)) s"
}

# lock keeps a second build out of the cache until this one ends.
lock() {
	mkdir -p "$cache"
	exec 9>"$cache/lock"
	flock -n 9 || { echo "waiting for another build" && flock 9; }
}
