# shellcheck shell=bash disable=SC2034
# Sourced by the scripts in this directory. Sets paths and names.
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
cache=${TRIVET_E2E_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/trivet-e2e}
bin=$cache/bin
images=$cache/images
# The registry of a cluster, in its network namespace.
registry=127.0.0.1:5000
interval=${INTERVAL:-0.2}
# The name of a file in each state directory. down.sh only removes directories with it.
marker=trivet-e2e-cluster
# The repository may belong to another user than root, who runs the scripts.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'

node_name() { echo "node$1"; }
node_ip() { echo "10.111.0.$1"; }

fail() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# find_state sets state to the state directory: TRIVET_E2E_STATE, or else the only one in
# /tmp that belongs to the user.
find_state() {
	local dir found=()
	state=${TRIVET_E2E_STATE:-}
	if [ -z "$state" ]; then
		for dir in /tmp/trivet-e2e.*; do
			# Other users can create directories and links in /tmp.
			if [ -d "$dir" ] && [ ! -L "$dir" ] && [ -O "$dir" ]; then found+=("$dir"); fi
		done
		[ ${#found[@]} -gt 0 ] || fail "no cluster is running: start one with up.sh, or set TRIVET_E2E_STATE"
		[ ${#found[@]} = 1 ] || fail "several clusters exist: set TRIVET_E2E_STATE to one of ${found[*]}"
		state=${found[0]}
	fi
	state=$(readlink -m "$state")
	# The cgroups of each cluster have a different name.
	cgroup=trivet-e2e-$(sha256sum <<<"$state" | cut -c1-8)
	export TRIVET_E2E_STATE=$state
}

# runs PROCESS SCRIPT: whether a process, given by its directory in a /proc, runs a script
# for the cluster in $state. Its ID may have been reused for another process.
runs() {
	local words i
	mapfile -d '' -t words 2>/dev/null <"$1/cmdline" || return 1
	for i in "${!words[@]}"; do
		if [[ ${words[i]} == */$2 && ${words[i + 1]:-} == "$state" ]]; then return 0; fi
	done
	return 1
}

# debian_packages PROGRAM:PACKAGE...: installs the packages whose programs are missing.
debian_packages() {
	local p missing=()
	for p; do PATH=$PATH:/usr/sbin:/sbin command -v "${p%%:*}" >/dev/null || missing+=("${p#*:}"); done
	[ ${#missing[@]} -gt 0 ] || return 0
	echo "installing Debian packages: ${missing[*]}"
	apt-get -qq update
	# Another apt-get may be running, for example that of make beside the build of .ci/run.
	DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends "${missing[@]}" >/dev/null
}

# once NAME FUNCTION INPUT...: runs the function, unless it has succeeded before with the
# same text of the function, the same Go version and the same content of the inputs, which
# are files or directories.
once() {
	# The function sees these variables, so they have names that it does not use.
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

# lock waits until no other build uses the cache, and locks it until this script ends.
lock() {
	mkdir -p "$cache"
	exec 9>"$cache/lock"
	flock -n 9 || { echo "waiting for another build" && flock 9; }
}
