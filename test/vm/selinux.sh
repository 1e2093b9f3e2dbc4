#!/bin/bash
# selinux.sh: print the path of a binary SELinux policy for guests of vm.sh: base and
# unconfined of Debian's default policy, and selinux.cil.
#
# For Debian 12. The packages are downloaded and unpacked once, and not installed,
# because this machine may not use SELinux. VM_CACHE is that of vm.sh. A guest with
# the arguments `--append security=selinux --append enforcing=0` loads the policy in
# one write:
#   mount -t selinuxfs selinuxfs /sys/fs/selinux
#   dd if=POLICY of=/sys/fs/selinux/load bs=64M iflag=fullblock
#   echo 1 >/sys/fs/selinux/enforce
set -euo pipefail

here=$(dirname "$(realpath "$0")")
cache=${VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/trivet-vm}
policy=$cache/selinux-$(cat "$here/selinux.sh" "$here/selinux.cil" | sha256sum | cut -c1-16)

if [ ! -e "$policy" ]; then
	mkdir -p "$cache"
	work=$(mktemp -d "$cache/unpacking.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	cd "$work"
	get=(apt-get -qq -o APT::Sandbox::User=root)
	packages=(selinux-policy-default policycoreutils secilc)
	{ "${get[@]}" download "${packages[@]}" || { "${get[@]}" update && "${get[@]}" download "${packages[@]}"; }; } >&2
	for package in *.deb; do dpkg -x "$package" .; done
	for module in base unconfined; do
		# The users of this machine have no mappings, and the one of sddm names an unknown user.
		bzcat "usr/share/selinux/default/$module.pp.bz2" | usr/libexec/selinux/hll/pp | grep -v '^(selinuxuser' >"$module.cil"
	done
	usr/bin/secilc -N -o policy -f /dev/null base.cil unconfined.cil "$here/selinux.cil" >&2
	mv policy "$policy"
fi
echo "$policy"
