# shellcheck shell=bash disable=SC2154
# Sourced by build.sh. Builds archives with images of the programs. The images have the
# names that charts and the tests of Kubernetes use.

# archive FILE CONFIG NAME...: writes an image with $work/rootfs as its only layer, and
# removes $work.
archive() {
	local file=$1 config=$2 names layer
	shift 2
	names=$(printf ',"%s"' "$@")
	tar --sort=name --mtime=@0 --numeric-owner -C "$work/rootfs" -cf "$work/layer.tar" .
	layer=$(sha256sum <"$work/layer.tar" | cut -d' ' -f1)
	printf '{"architecture":"%s","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
		"$(go env GOARCH)" "$config" "$layer" >"$work/config.json"
	printf '[{"Config":"config.json","RepoTags":[%s],"Layers":["layer.tar"]}]' "${names:1}" >"$work/manifest.json"
	tar -C "$work" -cf "$work/image.tar" config.json layer.tar manifest.json
	mv "$work/image.tar" "$images/$file"
	rm -rf "$work"
}

# new_rootfs: creates an empty $work/rootfs.
new_rootfs() {
	work=$(mktemp -d "$cache/image.XXXXXX")
	mkdir -p "$work/rootfs"/{etc,tmp}
	chmod 755 "$work/rootfs"
	chmod 1777 "$work/rootfs/tmp"
}

# program_image FILE PROGRAM PATH NAME: writes an image of one static program.
program_image() {
	new_rootfs
	cp "$bin/$2" "$work/rootfs$3"
	archive "$1" "{\"Entrypoint\":[\"$3\"]}" "$4"
}

path_env='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]'

busybox_rootfs() {
	local r applet
	new_rootfs
	r=$work/rootfs
	mkdir -p "$r"/{bin,sbin,root,home,var/run,var/tmp,usr/bin,usr/sbin,usr/local/bin,dev,proc,sys,run,mnt}
	chmod 1777 "$r/var/tmp"
	cp /bin/busybox "$r/bin/busybox"
	for applet in $(/bin/busybox --list | grep -vx busybox); do ln -s busybox "$r/bin/$applet"; done
	ln -s ../../bin/env "$r/usr/bin/env"
	# Without a name for group 1000, because the tests read group IDs from `ls -l`.
	printf '%s\n' root:x:0:0:root:/root:/bin/sh nobody:x:65534:65534:nobody:/:/bin/false >"$r/etc/passwd"
	printf '%s\n' root:x:0: nogroup:x:65534: >"$r/etc/group"
	echo 'hosts: files dns' >"$r/etc/nsswitch.conf"
}

# name KEY: prints the name of an image in the tests of Kubernetes.
name() { awk -v key="$1" '$1 == key {print $2}' "$cache/imagenames"; }

# tag IMAGE: prints the tag of a sidecar that is not available as a Go module, from a
# comment in kubernetes/go.mod.
tag() { awk -v image="$1" '$1 == "//" && $2 == "image" && $3 == image {print $4}' "$here/kubernetes/go.mod"; }

make_images() {
	local s=registry.k8s.io/sig-storage m=github.com/kubernetes-csi p v
	rm -rf "$cache"/image.*
	program_image pause.tar pause /pause "$(name pause)"
	for p in csi-provisioner:external-provisioner/v6 csi-attacher:external-attacher/v4 csi-resizer:external-resizer/v2 \
		csi-snapshotter:external-snapshotter/v8 snapshot-controller:external-snapshotter/v8; do
		v=$(version "$m/${p#*:}")
		p=${p%%:*}
		program_image "$p.tar" "$p" "/$p" "$s/$p:$v"
	done
	p=csi-node-driver-registrar
	program_image $p.tar registrar /$p "$s/$p:$(tag $p)"
	p=livenessprobe
	program_image $p.tar $p /$p "$s/$p:$(tag $p)"
	busybox_rootfs
	archive busybox.tar "{$path_env,\"Cmd\":[\"sh\"]}" docker.io/library/busybox:1.37 docker.io/library/busybox:latest "$(name busybox)"
	# Some tests of the suite need GNU tools and bash in the nginx image.
	new_rootfs
	rm -rf "$work/rootfs"
	ln -s "$cache/debian" "$work/rootfs"
	archive debian.tar "{$path_env,\"Cmd\":[\"bash\"]}" docker.io/library/debian:bookworm-slim "$(name nginx)" "$(name glibc)"
}

make_suite_images() {
	busybox_rootfs
	printf '#!/bin/sh\nexec /bin/sh "$@"\n' >"$work/rootfs/bin/bash"
	chmod 755 "$work/rootfs/bin/bash"
	cp "$bin/agnhost" "$work/rootfs/agnhost"
	ln -s agnhost "$work/rootfs/agnhost-2"
	mkdir "$work/rootfs/uploads"
	archive agnhost.tar "{$path_env,\"Entrypoint\":[\"/agnhost\"],\"Cmd\":[\"pause\"]}" "$(name agnhost)"
}

# make_backup_images writes the images of Velero, its plugin and restic to a directory of their
# own, because only the tests of backups need them.
make_backup_images() {
	local images=$cache/backup v=github.com/vmware-tanzu
	mkdir -p "$images"
	new_rootfs
	mkdir -p "$work/rootfs"/{root,home/cnb}
	chown 1002:1000 "$work/rootfs/home/cnb"
	printf '%s\n' root:x:0:0:root:/root:/sbin/nologin cnb:x:1002:1000::/home/cnb:/sbin/nologin >"$work/rootfs/etc/passwd"
	cp "$bin/velero" "$work/rootfs/velero"
	archive velero.tar "{$path_env,\"User\":\"1002:1000\"}" "docker.io/velero/velero:$(backup_version $v/velero)"
	new_rootfs
	mkdir "$work/rootfs"/{bin,plugins}
	cp "$bin/velero-plugin-for-aws" "$work/rootfs/plugins/"
	cp "$bin/cp-plugin" "$work/rootfs/bin/"
	archive velero-plugin.tar '{"User":"65532:65532","Entrypoint":["/bin/cp-plugin","/plugins/velero-plugin-for-aws","/target/velero-plugin-for-aws"]}' \
		"docker.io/velero/velero-plugin-for-aws:$(backup_version $v/velero-plugin-for-aws)"
	busybox_rootfs
	cp "$bin/restic" "$work/rootfs/usr/bin/"
	v=$(backup_version github.com/restic/restic)
	archive restic.tar "{$path_env,\"Entrypoint\":[\"/usr/bin/restic\"]}" "docker.io/restic/restic:${v#v}"
}

# unpack_images writes unpacked.tar: a directory of containerd that contains all images
# except Debian's, whose many files take minutes in a virtual machine.
unpack_images() {
	new_rootfs
	mkdir "$work/state"
	cat >"$work/config.toml" <<-E
		version = 3
		root = "$work/rootfs"
		state = "$work/state"
		disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]
		[grpc]
		  address = "$work/state/socket"
	E
	unshare --mount --net --pid --fork --kill-child --mount-proc bash -ec '
		containerd=$1/containerd ctr="$1/ctr --address $2/state/socket"
		"$containerd" --config "$2/config.toml" 2>"$2/log" &
		until $ctr version >/dev/null 2>&1; do sleep 0.2; done
		for archive in "$3"/*.tar; do
			[[ $archive == */debian.tar ]] || $ctr --namespace k8s.io images import --local "$archive"
		done
		kill %1
		wait' bash "$bin" "$work" "$images" >/dev/null
	tar -C "$work/rootfs" -cf "$cache/unpacked.new" .
	mv "$cache/unpacked.new" "$cache/unpacked.tar"
	rm -rf "$work"
}
