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
	// group and user are the fsGroup and the runAsUser of pods.
	group = 4711
	user  = 1000
	// tmpfs is TMPFS_MAGIC (linux/magic.h).
	tmpfs = 0x01021994
)

// hugePod is a pod with a volume of huge pages. Some machines have no huge pages.
const hugePod = `
apiVersion: v1
kind: Pod
metadata: {name: huge, uid: huge}
spec:
  containers: [{name: main, image: none, resources: {limits: {hugepages-2Mi: 4Mi}}}]
  volumes: [{name: huge, emptyDir: {medium: HugePages, sizeLimit: 4Mi}}]
`

// TestPlugins mounts a pod with each kind of volume, and checks contents, owners and paths.
func TestPlugins(t *testing.T) {
	m := newMachineWithDriver(t)
	m.installFlex("trivet", "loop", "local")
	m.installScript()
	host := m.hostFiles()
	disk, _, _ := testenv.Disk(t, 64<<20)
	raw, _, _ := testenv.Disk(t, 16<<20)
	handle := m.createVolume("made-before")

	m.put("config", settings)
	m.put("claims", claim("data", "xfs", "320Mi", ""), claim("device", "ext4", "16Mi", ", volumeMode: Block"), claim("kept", "kept", "32Mi", ""),
		claim("late", "late", "32Mi", ""), claim("dir", `""`, "1Mi", ", volumeName: dir"), claim("disk", `""`, "1Mi", ", volumeName: disk"),
		claim("raw", `""`, "1Mi", ", volumeMode: Block, volumeName: raw"), claim("before", `""`, "1Mi", ", volumeName: before"),
		claim("flexed", `""`, "1Mi", ", volumeName: flexed"))
	m.put("volumes",
		persistent("dir", "1Gi", fmt.Sprintf("local: {path: %q}", host)),
		persistent("disk", "64Mi", fmt.Sprintf("local: {path: %q, fsType: ext4}", disk)),
		persistent("raw", "16Mi", fmt.Sprintf("volumeMode: Block, local: {path: %q}", raw)),
		persistent("before", "32Mi", fmt.Sprintf("csi: {driver: csi.trivet.dev, volumeHandle: %q, fsType: ext4}", handle)),
		persistent("flexed", "32Mi", `flexVolume: {driver: trivet/loop, fsType: ext4, options: {size: 32Mi}}`))
	m.put("all", podWith("all", fmt.Sprintf(`serviceAccountName: web
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
	m.put("huge", hugePod)
	p := m.await("all")
	m.checkContents(p, host)
	m.checkPaths(p)
	m.checkLimit(p["limited"], "8Mi")
	m.checkHuge()
	m.remove("all")
	m.awaitRemoved("all")
	m.checkHostFiles(host)
	m.checkFlexClean()
	m.removeAll(p["kept"].PersistentVolume)
	must(t, m.checkPool(2)) // the retained volume, and the volume that createVolume has created
}

// installFlex installs this program as FlexVolume drivers.
func (m *machine) installFlex(names ...string) {
	m.t.Helper()
	config := fmt.Sprintf("pools: [{name: flex, directory: {path: %q}}]\n", filepath.Join(filepath.Dir(m.pool), "flex"))
	for _, name := range names {
		dir := filepath.Join(m.flex, "trivet~"+name)
		must(m.t, os.Mkdir(dir, 0o755))
		must(m.t, os.Symlink(program, filepath.Join(dir, name)))
		must(m.t, os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600))
	}
}

// installScript installs a FlexVolume driver that is a shell script.
func (m *machine) installScript() {
	m.t.Helper()
	const script = `#!/bin/sh
case $1 in
init) echo '{"status": "Success", "capabilities": {"attach": false}}' ;;
mount) mountpoint -q "$2" || { mkdir -p "$2" && mount -t tmpfs -o size=1m script "$2" && echo "$3" >"$2/options"; } && echo '{"status": "Success"}' ;;
unmount) { ! mountpoint -q "$2" || umount "$2"; } && echo '{"status": "Success"}' ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
`
	dir := filepath.Join(m.flex, "example~script")
	must(m.t, os.Mkdir(dir, 0o755))
	must(m.t, os.WriteFile(filepath.Join(dir, "script"), []byte(script), 0o755))
}

// checkFlexClean checks that the FlexVolume executables leave no mounts and no records of mounts. After a kill, they clean up in the call
// init, which the manager makes when it starts.
func (m *machine) checkFlexClean() {
	m.t.Helper()
	eventually(m.t, func() error {
		for _, dir := range []string{"staged", "targets"} {
			if left, err := os.ReadDir(filepath.Join(m.dir, "flexstate", dir)); err != nil || len(left) > 0 {
				return fmt.Errorf("directory %s of the FlexVolume state: got %v, error %v; want it empty", dir, left, err) //nolint:errorlint // err may be nil
			}
		}
		return nil
	})
}

// hostFiles creates a directory with a file and a socket for hostPath volumes.
func (m *machine) hostFiles() string {
	m.t.Helper()
	dir := filepath.Join(m.dir, "host")
	must(m.t, os.Mkdir(dir, 0o755))
	must(m.t, os.WriteFile(dir+"/file", []byte("the machine's"), 0o600))
	l, err := net.Listen("unix", dir+"/socket")
	must(m.t, err)
	m.t.Cleanup(func() { _ = l.Close() })
	return dir
}

// checkHostFiles checks that the files of hostPath volumes were not removed with the pod.
func (m *machine) checkHostFiles(host string) {
	m.t.Helper()
	for path, want := range map[string]string{"file": "the machine's", "new-file": "", "new/dir": ""} {
		b, err := os.ReadFile(filepath.Join(host, path))
		if string(b) != want || err != nil && path != "new/dir" {
			m.t.Errorf("host file %s: got %q, error %v; want %q", path, b, err, want)
		}
	}
}

// createVolume creates a volume with a call of the driver and returns its ID.
func (m *machine) createVolume(name string) (id string) {
	m.t.Helper()
	request := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}, Parameters: map[string]string{"backend": "loop"},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
		}},
	}
	controller := m.controller()
	eventually(m.t, func() error {
		resp, err := controller.CreateVolume(m.t.Context(), request)
		id = resp.GetVolume().GetVolumeId()
		return err
	})
	return id
}

// checkContents checks the modes, owners and contents of the volumes of a pod, and writes to them.
func (m *machine) checkContents(p pod, host string) {
	t := m.t
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
			t.Errorf("%s: got content %q, mode %o, owner %d:%d; want %+v", path, b, st.Mode, st.Uid, st.Gid, want)
		}
	}
	for _, volume := range []string{"disky", "memory", "data", "kept", "late", "disk", "before", "inline", "inline-memory", "own", "flexed", "flex-own", "flex-dir", "limited"} {
		checkWritable(t, p[volume].Path)
	}
	for _, volume := range []string{"secret", "projected", "memory", "inline-memory"} {
		var st syscall.Statfs_t
		must(t, syscall.Statfs(p[volume].Path, &st))
		if st.Type != tmpfs {
			t.Errorf("filesystem type of volume %s: got %x, want tmpfs", volume, st.Type)
		}
	}
	for volume, size := range map[string]int64{"memory": 8 << 20, "inline-memory": 1 << 20} {
		if got := sizeOf(t, p[volume].Path); got != size {
			t.Errorf("size of volume %s: got %d, want %d", volume, got, size)
		}
	}
	for volume, size := range map[string]string{"device": "16777216", "raw": "16777216"} {
		if got := testenv.Run(t, "blockdev", "--getsize64", p[volume].Path); got != size {
			t.Errorf("size of device %s: got %s, want %s", volume, got, size)
		}
	}
	if found, err := filepath.Glob(p["maybe"].Path + "/[^.]*"); err != nil || len(found) > 0 {
		t.Errorf("volume of a missing optional ConfigMap: got files %q, error %v; want none", found, err)
	}
	if _, err := os.Stat(host + "/new/dir"); err != nil {
		t.Error(err)
	}
}

// checkLimit checks the message of an emptyDir with a sizeLimit. If the filesystem cannot enforce the
// limit, the message must say so.
func (m *machine) checkLimit(v reconciler.VolumeStatus, size string) {
	m.t.Helper()
	dir, err := os.Open(m.root)
	must(m.t, err)
	defer dir.Close()
	limits, err := quota.Open(dir)
	must(m.t, err)
	defer func() { must(m.t, limits.Close()) }()
	want := ""
	if limits.Kind() == quota.None {
		want = "emptyDir.sizeLimit " + size + " is not enforced: " + limits.Why()
	}
	if v.Message != want {
		m.t.Errorf("message of the emptyDir with a limit: got %q, want %q", v.Message, want)
	}
}

// checkHuge checks that the volume of hugePod is mounted. If no huge pages are reserved, its message
// must say so.
func (m *machine) checkHuge() {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			switch {
			case v.Volume != "huge":
			case v.Phase == state.Mounted:
				return m.isHuge(v.Path)
			case v.Phase == state.Failed && strings.Contains(v.Message, "no huge pages of 2 MiB are reserved"):
				return nil
			default:
				return fmt.Errorf("volume of huge pages: got phase %s, message %q; want it mounted, or failed because no pages are reserved", v.Phase, v.Message)
			}
		}
		return errors.New("the status has no volume huge")
	})
}

// isHuge returns an error unless the volume of hugePod is mounted at path.
func (m *machine) isHuge(path string) error {
	for _, entry := range mountTable(m.t) {
		if entry.path == path && entry.fsType == "hugetlbfs" && sizeOf(m.t, path) == 4<<20 {
			return nil
		}
	}
	return fmt.Errorf("%s is not a hugetlbfs of 4 MiB", path)
}

// checkWritable checks that the pod's group can write to a volume, and writes a file.
func checkWritable(t *testing.T, path string) {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	if st.Gid != group || st.Mode&0o070 != 0o070 || st.Mode&syscall.S_ISGID == 0 {
		t.Errorf("%s: got mode %o, owner %d:%d; want group %d with set-group-ID bit and rwx", path, st.Mode, st.Uid, st.Gid, group)
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

// checkPaths checks that volumes, devices and subPaths are at the paths of a kubelet.
func (m *machine) checkPaths(p pod) {
	t := m.t
	t.Helper()
	at := filepath.Join(m.root, "pods/all")
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
			t.Errorf("path of volume %s: got %s, want pods/all/%s", volume, p[volume].Path, want)
		}
	}
	for path, volume := range map[string]string{"kubernetes.io/csi/volumeDevices/pvc-device/dev/all": "device", "kubernetes.io~local-volume/volumeDevices/raw/all": "raw"} {
		got, err := os.Lstat(filepath.Join(m.root, "plugins", path))
		must(t, err)
		want, err := os.Stat(p[volume].Path)
		must(t, err)
		if got.Mode().Type() != fs.ModeDevice || got.Sys().(*syscall.Stat_t).Rdev != want.Sys().(*syscall.Stat_t).Rdev {
			t.Errorf("plugins/%s: got %v, want the device of volume %s", path, got.Mode(), volume)
		}
	}
	for path, volume := range map[string]string{"disky/main/1": "disky", "config/main/2": "config", "pvc-data/main/3": "data"} {
		parts := p[volume].SubPaths
		if path = filepath.Join(at, "volume-subpaths", path); len(parts) != 1 || parts[0].Path != path {
			t.Errorf("subPaths of volume %s: got %+v, want only %s", volume, parts, path)
		}
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(at, "volume-subpaths/config/main/2")); string(b) != "hello" {
		t.Errorf("subPath of a ConfigMap: got %q, error %v; want hello", b, err)
	}
}
