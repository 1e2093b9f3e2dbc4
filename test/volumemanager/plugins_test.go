package volumemanager

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

const (
	group = 4711
	user  = 1000
	// tmpfs is TMPFS_MAGIC (linux/magic.h).
	tmpfs = 0x01021994
)

// huge is a pod with a volume of huge pages. Some machines have none.
const huge = `
apiVersion: v1
kind: Pod
metadata: {name: huge, uid: huge}
spec:
  containers: [{name: main, image: none, resources: {limits: {hugepages-2Mi: 4Mi}}}]
  volumes: [{name: huge, emptyDir: {medium: HugePages, sizeLimit: 4Mi}}]
`

// TestPlugins checks a pod with each kind of volume that this kernel supports.
func TestPlugins(t *testing.T) {
	g := newTrivet(t)
	g.installFlex("trivet", "loop", "local")
	g.installScript()
	host := g.hostFiles()
	disk, _, _ := testenv.Disk(t, 64<<20)
	raw, _, _ := testenv.Disk(t, 16<<20)
	handle := g.create("made-before")

	g.put("config", settings)
	g.put("claims", claim("data", "xfs", "320Mi", ""), claim("device", "ext4", "16Mi", ", volumeMode: Block"), claim("kept", "kept", "32Mi", ""),
		claim("late", "late", "32Mi", ""), claim("dir", `""`, "1Mi", ", volumeName: dir"), claim("disk", `""`, "1Mi", ", volumeName: disk"),
		claim("raw", `""`, "1Mi", ", volumeMode: Block, volumeName: raw"), claim("before", `""`, "1Mi", ", volumeName: before"),
		claim("flexed", `""`, "1Mi", ", volumeName: flexed"))
	g.put("volumes",
		persistent("dir", "1Gi", fmt.Sprintf("local: {path: %q}", host)),
		persistent("disk", "64Mi", fmt.Sprintf("local: {path: %q, fsType: ext4}", disk)),
		persistent("raw", "16Mi", fmt.Sprintf("volumeMode: Block, local: {path: %q}", raw)),
		persistent("before", "32Mi", fmt.Sprintf("csi: {driver: csi.trivet.dev, volumeHandle: %q, fsType: ext4}", handle)),
		persistent("flexed", "32Mi", `flexVolume: {driver: trivet/loop, fsType: ext4, options: {size: 32Mi}}`))
	g.put("all", podWith("all", fmt.Sprintf(`serviceAccountName: web
  securityContext: {fsGroup: %d, runAsUser: %d}
  containers:
  - name: main
    image: none
    volumeMounts:
    - {name: disky, mountPath: /a}
    - {name: disky, mountPath: /b, subPath: part/of}
    - {name: config, mountPath: /c, subPath: greeting, readOnly: true}
    - {name: data, mountPath: /d, subPathExpr: "$(ME)"}
    env: [{name: ME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
    volumeDevices: [{name: device, devicePath: /dev/x}, {name: raw, devicePath: /dev/y}]`, group, user),
		"{name: disky, emptyDir: {}}",
		"{name: limited, emptyDir: {sizeLimit: 8Mi}}",
		"{name: memory, emptyDir: {medium: Memory, sizeLimit: 8Mi}}",
		"{name: config, configMap: {name: settings, items: [{key: greeting, path: greeting}]}}",
		"{name: maybe, configMap: {name: none, optional: true}}",
		"{name: secret, secret: {secretName: keys, defaultMode: 256}}",
		"{name: down, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}, {path: labels, fieldRef: {fieldPath: metadata.labels}}]}}",
		"{name: projected, projected: {sources: [{configMap: {name: settings}}, {secret: {name: keys}}, {serviceAccountToken: {path: token, audience: them}}]}}",
		fmt.Sprintf("{name: host-dir, hostPath: {path: %q, type: Directory}}", host),
		fmt.Sprintf("{name: host-new-dir, hostPath: {path: %q, type: DirectoryOrCreate}}", host+"/new/dir"),
		fmt.Sprintf("{name: host-file, hostPath: {path: %q, type: File}}", host+"/file"),
		fmt.Sprintf("{name: host-new-file, hostPath: {path: %q, type: FileOrCreate}}", host+"/new-file"),
		fmt.Sprintf("{name: host-socket, hostPath: {path: %q, type: Socket}}", host+"/socket"),
		"{name: host-char, hostPath: {path: /dev/null, type: CharDevice}}",
		fmt.Sprintf("{name: host-block, hostPath: {path: %q, type: BlockDevice}}", disk),
		claimed("data"), claimed("device"), claimed("kept"), claimed("late"), claimed("dir"), claimed("disk"), claimed("raw"), claimed("before"), claimed("flexed"),
		"{name: inline, csi: {driver: csi.trivet.dev, volumeAttributes: {size: 32Mi}}}",
		"{name: inline-memory, csi: {driver: csi.trivet.dev, volumeAttributes: {size: 1Mi, medium: memory}}}",
		"{name: own, ephemeral: {volumeClaimTemplate: {spec: {storageClassName: ext4, accessModes: [ReadWriteOnce], resources: {requests: {storage: 32Mi}}}}}}",
		"{name: scripted, flexVolume: {driver: example/script, options: {word: abc}}}",
		"{name: flex-own, flexVolume: {driver: trivet/trivet, fsType: xfs, options: {backend: loop, size: 320Mi, volume: mine}}}",
		"{name: flex-dir, flexVolume: {driver: trivet/local, options: {size: 32Mi}}}",
	))
	g.put("huge", huge)
	p := g.await("all")
	g.checkContents(p, host)
	g.checkPaths(p)
	g.checkLimit(p["limited"])
	g.checkHuge()
	g.remove("all")
	g.gone("all")
	g.wantKept(host)
	g.wantFlexClean()
	g.wantNothing(p["kept"].PersistentVolume)
	must(t, g.poolHas(2)) // the retained volume, and the one of create
}

// installFlex installs this program as FlexVolume drivers.
func (g *ground) installFlex(names ...string) {
	g.t.Helper()
	config := fmt.Sprintf("pools: [{name: flex, directory: {path: %q}}]\n", filepath.Join(filepath.Dir(g.pool), "flex"))
	for _, name := range names {
		dir := filepath.Join(g.flex, "trivet~"+name)
		must(g.t, os.Mkdir(dir, 0o755))
		must(g.t, os.Symlink(program, filepath.Join(dir, name)))
		must(g.t, os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600))
	}
}

// installScript installs a FlexVolume driver that is a shell script.
func (g *ground) installScript() {
	g.t.Helper()
	const script = `#!/bin/sh
case $1 in
init) echo '{"status": "Success", "capabilities": {"attach": false}}' ;;
mount) mountpoint -q "$2" || { mkdir -p "$2" && mount -t tmpfs -o size=1m script "$2" && echo "$3" >"$2/options"; } && echo '{"status": "Success"}' ;;
unmount) { ! mountpoint -q "$2" || umount "$2"; } && echo '{"status": "Success"}' ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
`
	dir := filepath.Join(g.flex, "example~script")
	must(g.t, os.Mkdir(dir, 0o755))
	must(g.t, os.WriteFile(filepath.Join(dir, "script"), []byte(script), 0o755))
}

func (g *ground) wantFlexClean() {
	g.t.Helper()
	for _, dir := range []string{"staged", "targets"} {
		if left, err := os.ReadDir(filepath.Join(g.dir, "flexstate", dir)); err != nil || len(left) > 0 {
			g.t.Errorf("the flexVolume's %s: %v, %v", dir, left, err)
		}
	}
}

// hostFiles creates a directory with a file and a socket for hostPath volumes.
func (g *ground) hostFiles() string {
	g.t.Helper()
	dir := filepath.Join(g.dir, "host")
	must(g.t, os.Mkdir(dir, 0o755))
	must(g.t, os.WriteFile(dir+"/file", []byte("the machine's"), 0o600))
	l, err := net.Listen("unix", dir+"/socket")
	must(g.t, err)
	g.t.Cleanup(func() { _ = l.Close() })
	return dir
}

// wantKept checks that the machine's files were not removed.
func (g *ground) wantKept(host string) {
	g.t.Helper()
	for path, want := range map[string]string{"file": "the machine's", "new-file": "", "new/dir": ""} {
		b, err := os.ReadFile(filepath.Join(host, path))
		if string(b) != want || err != nil && path != "new/dir" {
			g.t.Errorf("%s: %q, %v", path, b, err)
		}
	}
}

// create creates a volume through the driver.
func (g *ground) create(name string) (id string) {
	g.t.Helper()
	request := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}, Parameters: map[string]string{"backend": "loop"},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
		}},
	}
	control := g.control()
	eventually(g.t, func() error {
		resp, err := control.CreateVolume(g.t.Context(), request)
		id = resp.GetVolume().GetVolumeId()
		return err
	})
	return id
}

// checkContents checks modes, owners and contents of a pod's volumes, and writes to them.
func (g *ground) checkContents(p pod, host string) {
	t := g.t
	t.Helper()
	for volume, want := range map[string]struct {
		file, content string
		mode          fs.FileMode
		uid, gid      uint32
	}{
		"config":    {"greeting", "hello", 0o644, 0, group},
		"secret":    {"password", "s3cret", 0o440, 0, group},
		"down":      {"labels", `app="web"`, 0o644, 0, group},
		"projected": {"token", "", 0o640, user, group},
		"scripted":  {"options", "", 0o664, 0, group},
		"host-dir":  {"file", "the machine's", 0o660, 0, group},
		"dir":       {"file", "the machine's", 0o660, 0, group},
	} {
		path := filepath.Join(p[volume].Path, want.file)
		b, err := os.ReadFile(path)
		must(t, err)
		var st syscall.Stat_t
		must(t, syscall.Stat(path, &st))
		if want.content != "" && string(b) != want.content || fs.FileMode(st.Mode).Perm() != want.mode || st.Uid != want.uid || st.Gid != want.gid {
			t.Errorf("%s: %q, %o, %d:%d; want %+v", path, b, st.Mode, st.Uid, st.Gid, want)
		}
	}
	for _, volume := range []string{"disky", "memory", "data", "kept", "late", "disk", "before", "inline", "inline-memory", "own", "flexed", "flex-own", "flex-dir", "limited"} {
		writable(t, p[volume].Path)
	}
	for _, volume := range []string{"secret", "projected", "memory", "inline-memory"} {
		var st syscall.Statfs_t
		must(t, syscall.Statfs(p[volume].Path, &st))
		if st.Type != tmpfs {
			t.Errorf("%s is not in memory: %x", volume, st.Type)
		}
	}
	for volume, size := range map[string]int64{"memory": 8 << 20, "inline-memory": 1 << 20} {
		if has := sizeOf(t, p[volume].Path); has != size {
			t.Errorf("%s has %d bytes, want %d", volume, has, size)
		}
	}
	for volume, size := range map[string]string{"device": "16777216", "raw": "16777216"} {
		if has := testenv.Run(t, "blockdev", "--getsize64", p[volume].Path); has != size {
			t.Errorf("%s has %s bytes, want %s", volume, has, size)
		}
	}
	if found, err := filepath.Glob(p["maybe"].Path + "/[^.]*"); err != nil || len(found) > 0 {
		t.Errorf("a missing optional ConfigMap: %q, %v", found, err)
	}
	if _, err := os.Stat(host + "/new/dir"); err != nil {
		t.Error(err)
	}
}

// checkLimit checks that an emptyDir of 8 MiB has a limit, or that its status says why not.
func (g *ground) checkLimit(v reconciler.VolumeStatus) {
	g.t.Helper()
	dir, err := os.Open(g.root)
	must(g.t, err)
	defer dir.Close()
	limits, err := quota.Open(dir)
	must(g.t, err)
	defer func() { must(g.t, limits.Close()) }()
	want := ""
	if limits.Kind() == quota.None {
		want = "emptyDir.sizeLimit 8Mi is not enforced: " + limits.Why()
	}
	if v.Message != want {
		g.t.Errorf("the message of the limited emptyDir is %q, want %q", v.Message, want)
	}
}

// checkHuge checks that the volume of huge pages is mounted, or that its status says how to reserve
// pages.
func (g *ground) checkHuge() {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			switch {
			case v.Volume != "huge":
			case v.Phase == state.Mounted:
				return g.isHuge(v.Path)
			case v.Phase == state.Failed && strings.Contains(v.Message, "no huge pages of 2097152 bytes are reserved"):
				return nil
			default:
				return fmt.Errorf("the volume of huge pages is %s: %q", v.Phase, v.Message)
			}
		}
		return errors.New("no volume of huge pages")
	})
}

// isHuge returns an error unless the volume of huge is mounted at a path.
func (g *ground) isHuge(path string) error {
	for _, m := range mountTable(g.t) {
		if m.path == path && m.fsType == "hugetlbfs" && sizeOf(g.t, path) == 4<<20 {
			return nil
		}
	}
	return fmt.Errorf("%s has no huge pages, or not 4 MiB", path)
}

// writable checks that the pod's group can write to a volume, and writes a file.
func writable(t *testing.T, path string) {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	if st.Gid != group || st.Mode&0o070 != 0o070 || st.Mode&syscall.S_ISGID == 0 {
		t.Errorf("%s is %o, %d:%d, and the pod's group cannot write", path, st.Mode, st.Uid, st.Gid)
	}
	must(t, os.WriteFile(filepath.Join(path, "mine"), []byte("precious"), 0o600))
}

// sizeOf returns the size of a filesystem in bytes.
func sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	must(t, syscall.Statfs(path, &st))
	return int64(st.Blocks) * st.Bsize
}

// checkPaths compares paths with the kubelet's.
func (g *ground) checkPaths(p pod) {
	t := g.t
	t.Helper()
	at := filepath.Join(g.root, "pods/all")
	for volume, want := range map[string]string{
		"disky":     "volumes/kubernetes.io~empty-dir/disky",
		"limited":   "volumes/kubernetes.io~empty-dir/limited",
		"memory":    "volumes/kubernetes.io~empty-dir/memory",
		"config":    "volumes/kubernetes.io~configmap/config",
		"secret":    "volumes/kubernetes.io~secret/secret",
		"down":      "volumes/kubernetes.io~downward-api/down",
		"projected": "volumes/kubernetes.io~projected/projected",
		"data":      "volumes/kubernetes.io~csi/pvc-data/mount",
		"before":    "volumes/kubernetes.io~csi/before/mount",
		"inline":    "volumes/kubernetes.io~csi/inline/mount",
		"dir":       "volumes/kubernetes.io~local-volume/dir",
		"disk":      "volumes/kubernetes.io~local-volume/disk",
		"flexed":    "volumes/trivet~loop/flexed",
		"scripted":  "volumes/example~script/scripted",
		"flex-own":  "volumes/trivet~trivet/flex-own",
		"flex-dir":  "volumes/trivet~local/flex-dir",
		"device":    "volumeDevices/kubernetes.io~csi/pvc-device",
		"raw":       "volumeDevices/kubernetes.io~local-volume/raw",
	} {
		if p[volume].Path != filepath.Join(at, want) {
			t.Errorf("%s is at %s, want pods/all/%s", volume, p[volume].Path, want)
		}
	}
	for path, volume := range map[string]string{"kubernetes.io/csi/volumeDevices/pvc-device/dev/all": "device", "kubernetes.io~local-volume/volumeDevices/raw/all": "raw"} {
		have, err := os.Lstat(filepath.Join(g.root, "plugins", path))
		must(t, err)
		want, err := os.Stat(p[volume].Path)
		must(t, err)
		if have.Mode().Type() != fs.ModeDevice || have.Sys().(*syscall.Stat_t).Rdev != want.Sys().(*syscall.Stat_t).Rdev {
			t.Errorf("plugins/%s is %v, and not the device of %s", path, have.Mode(), volume)
		}
	}
	for path, volume := range map[string]string{"disky/main/1": "disky", "config/main/2": "config", "pvc-data/main/3": "data"} {
		parts := p[volume].SubPaths
		if path = filepath.Join(at, "volume-subpaths", path); len(parts) != 1 || parts[0].Path != path {
			t.Errorf("subPath of %s: %+v, want %s", volume, parts, path)
		}
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(at, "volume-subpaths/config/main/2")); string(b) != "hello" {
		t.Errorf("subPath of a ConfigMap: %q, %v", b, err)
	}
}
