package driver_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/volume"
)

// poolKinds contains the only kind of volume whose pools have a section of their own.
var poolKinds = backend.Kinds{disk.Kind, lvm.Kind}

const goodConfig = `
# two pools
pools:
- name: default
  directory: {path: /var/lib/trivet/pools/default}
- name: fast
  directory:
    path: /mnt/nvme/trivet
  size: 500Gi
  reserve: 5%
  overcommit: 1.5
  maxVolumes: 200
  requireMount: true
  uuid: 01234567-89ab-4def-8123-456789abcdef
  ephemeral: true
maxVolumesPerNode: 64
ephemeralMemory: 1Gi
pprof: true
kubernetes:
  kubeletDir: /var/lib/k0s/kubelet
  startupTaint: true
  nfs: true
`

// TestParseConfig: the values of a valid configuration are read.
func TestParseConfig(t *testing.T) {
	c, err := driver.ParseConfig([]byte(goodConfig), poolKinds)
	must(t, err)
	fast := c.Pools[1]
	if len(c.Pools) != 2 || fast.Size != "500Gi" || fast.Overcommit != 1.5 || !fast.RequireMount || c.MaxVolumesPerNode != 64 || !c.Pprof || !fast.Ephemeral || c.Pools[0].Ephemeral || c.EphemeralMemory != "1Gi" {
		t.Errorf("got %+v, want the values of goodConfig", c)
	}
	if want := (driver.Kubernetes{KubeletDir: "/var/lib/k0s/kubelet", StartupTaint: true, NFS: true}); *c.Kubernetes != want {
		t.Errorf("got section kubernetes %+v, want %+v", *c.Kubernetes, want)
	}
}

// TestNFSPools: an nfs pool needs only a server and an export, and exports of two servers may have the same
// path.
func TestNFSPools(t *testing.T) {
	c, err := driver.ParseConfig([]byte(`
pools:
- name: nas
  nfs: {server: nas.lan, export: /tank/volumes}
- name: other
  nfs: {server: "[fd00::1]", export: /tank/volumes, mountOptions: ["nfsvers=4.2,hard", noatime], init: true, fencing: none, outage: 90s}
  size: 1Ti
`), poolKinds)
	must(t, err)
	other := c.Pools[1]
	if !c.Pools[0].Shared() || !other.NFS.Init || other.NFS.Fencing != "none" || other.NFS.OutageTime() != 90*time.Second || len(other.NFS.MountOptions) != 2 || other.Size != "1Ti" {
		t.Errorf("got %+v and %+v, want the values of the configuration", c.Pools[0].NFS, other.NFS)
	}
}

// TestNoPools: an empty list of pools is valid.
func TestNoPools(t *testing.T) {
	if c, err := driver.ParseConfig([]byte("pools: []\n"), poolKinds); err != nil || len(c.Pools) != 0 {
		t.Errorf("got %+v, error %v, want no pools and no error", c, err)
	}
}

// TestKubernetesSection: the section is optional, and all its keys have defaults.
func TestKubernetesSection(t *testing.T) {
	pool := "pools:\n- name: a\n  directory: {path: /a}\n"
	c, err := driver.ParseConfig([]byte(pool), poolKinds)
	if err != nil || c.Kubernetes != nil {
		t.Errorf("without the section: got %+v, error %v, want nil", c.Kubernetes, err)
	}
	c, err = driver.ParseConfig([]byte(pool+"kubernetes: {}\n"), poolKinds)
	if err != nil || *c.Kubernetes != (driver.Kubernetes{KubeletDir: "/var/lib/kubelet"}) {
		t.Errorf("with an empty section: got %+v, error %v, want only the default kubeletDir", c.Kubernetes, err)
	}
}

// TestExampleConfig: deploy/config.yaml sets every key of a pool: its last pool of each kind has all keys of that
// kind.
func TestExampleConfig(t *testing.T) {
	c, err := driver.LoadConfig("../deploy/config.yaml", false, "/state", poolKinds)
	must(t, err)
	if len(c.Pools) != 5 {
		t.Fatalf("got pools %+v, want 5", c.Pools)
	}
	if empty := emptyFields(c.Pools[1]); !slices.Equal(empty, []string{"NFS", "Section", "Sections"}) {
		t.Errorf("second directory pool: got the empty fields %q, want only those of other kinds of pools", empty)
	}
	if empty := emptyFields(*c.Pools[2].Section.(*disk.Disks)); len(empty) > 0 {
		t.Errorf("pool of disks: got the empty fields %q, want none", empty)
	}
	if empty := emptyFields(*c.Pools[3].Section.(*lvm.Group)); len(empty) > 0 {
		t.Errorf("pool of a volume group: got the empty fields %q, want none", empty)
	}
	if empty := emptyFields(*c.Pools[4].NFS); len(empty) > 0 {
		t.Errorf("nfs pool: got the empty fields %q, want none", empty)
	}
	if c.Kubernetes == nil || !c.Kubernetes.StartupTaint {
		t.Errorf("got section kubernetes %+v, want startupTaint true", c.Kubernetes)
	}
}

// emptyFields returns the names of the exported fields of a struct that have their zero value.
func emptyFields(of any) (empty []string) {
	v := reflect.ValueOf(of)
	for i := range v.NumField() {
		if v.Type().Field(i).IsExported() && v.Field(i).IsZero() {
			empty = append(empty, v.Type().Field(i).Name)
		}
	}
	return empty
}

// TestParseConfigRefuses: an invalid configuration is refused, and the error names the line and the key.
func TestParseConfigRefuses(t *testing.T) {
	pool := "pools:\n- name: a\n  directory: {path: /a}\n"
	nfs := "pools:\n- name: n\n  nfs:\n    export: /e\n"
	nfsPool := "pools:\n- name: n\n  nfs:\n    server: s\n    export: /e\n"
	forwarding := "forwarding:\n  nodes:\n"
	for _, tc := range []struct{ name, in, says string }{
		{"empty file", "", "pools: at least one is required"},
		{"invalid YAML", "pools: [", "line 1"},
		{"a map of pools", "pools:\n  a:\n    directory: {path: /a}\n", "line 2: pools is a map by name"},
		{"unknown key", "pool:\n- name: a\n", "line 1: field pool is not a key here"},
		{"unknown key of a pool", pool + "  siez: 1Gi\n", "line 4: field siez"},
		{"maxVolumes is not a number", pool + "  maxVolumes: many\n", "line 4"},
		{"invalid pool name", "pools:\n- name: A b\n  directory: {path: /a}\n", `line 2: pools[0].name "A b"`},
		{"pool without a name", "pools:\n- directory: {path: /a}\n", "line 2: pools[0].name"},
		{"pool without a location", "pools:\n- name: a\n", "line 2: pools[0].directory.path"},
		{"relative directory", "pools:\n- name: a\n  directory: {path: a}\n", `line 3: pools[0].directory.path "a"`},
		{"disks without a glob", "pools:\n- name: a\n  disks: {match: []}\n", "line 3: pools[0].disks.match is empty"},
		{"unknown key of a pool, similar to a known key", pool + "  quotas: auto\n", "line 4: field quotas is not a key here"},
		{"unknown key of disks", "pools:\n- name: a\n  disks:\n    match: [/dev/sd*]\n    mach: []\n", "line 5: field mach is not a key here"},
		{"disks is a list", "pools:\n- name: a\n  disks: [/dev/sd*]\n", "line 3: cannot unmarshal"},
		{"disks and a directory", pool + "  disks: {match: [/dev/sd*]}\n", "line 4: pools[0].disks is given beside"},
		{"size of a pool of disks", "pools:\n- name: a\n  disks: {match: [/dev/sd*]}\n  size: 1Gi\n", "a pool of disks does not support size"},
		{"invalid size", pool + "  size: 10GB\n", `line 4: pools[0].size "10GB"`},
		{"invalid trim", pool + "  trim: hourly\n", `line 4: pools[0].trim "hourly"`},
		{"trim of a pool of disks", "pools:\n- name: a\n  disks: {match: [/dev/sd*]}\n  trim: daily\n", "trim is not supported by pools of disks"},
		{"trim of an export", nfsPool + "  trim: daily\n", "trim is for pools of a node"},
		{"invalid check", pool + "  check: hourly\n", `line 4: pools[0].check "hourly"`},
		{"check of a pool of disks", "pools:\n- name: a\n  disks: {match: [/dev/sd*]}\n  check: daily\n", "check is not supported by pools of disks"},
		{"check of an export", nfsPool + "  check: daily\n", "check is for pools of a node"},
		{"check of thick logical volumes", "pools:\n- name: a\n  lvm: {volumeGroup: vg0}\n  checkWindow: 01:00-05:00\n", "without a thin pool"},
		{"trim of thick logical volumes", "pools:\n- name: a\n  lvm: {volumeGroup: vg0}\n  trim: daily\n", "without a thin pool"},
		{"size of 0", pool + "  size: 0\n", "line 4: pools[0].size"},
		{"reserve of 100%", pool + "  reserve: 100%\n", "line 4: pools[0].reserve"},
		{"overcommit below 1", pool + "  overcommit: 0.5\n", "line 4: pools[0].overcommit 0.5"},
		{"overcommit is not a number", pool + "  overcommit: .nan\n", "line 4: pools[0].overcommit"},
		{"negative maxVolumes", pool + "  maxVolumes: -1\n", "line 4: pools[0].maxVolumes"},
		{"invalid uuid", pool + "  uuid: 123\n", "line 4: pools[0].uuid"},
		{"two pools with one name", pool + "- name: a\n  directory: {path: /b}\n", "line 4: pools[1].name"},
		{"two pools with one path", pool + "- name: b\n  directory: {path: /a/}\n", "line 5: pools[1].directory.path"},
		{"a pool inside another", pool + "- name: b\n  directory: {path: /a/volumes/x/}\n", `line 5: pools[1].directory.path "/a/volumes/x": pool "b" is inside pool "a"`},
		{"a pool around another", pool + "- name: b\n  directory: {path: /}\n", `line 5: pools[1].directory.path "/": pool "a" is inside pool "b"`},
		{"an export inside another", nfsPool + "- name: m\n  nfs: {server: S, export: /e/f}\n", `line 7: pools[1].nfs.export "s:/e/f": pool "m" is inside pool "n"`},
		{"two exports of a server, one without a size", nfsPool + "- name: m\n  size: 1Gi\n  nfs: {server: S, export: /f}\n", `line 8: pools[1].size: pools "n" and "m" are exports of server s`},
		{"a directory and an export", pool + "  nfs: {server: s, export: /e}\n", "line 4: pools[0].nfs and directory are both given"},
		{"nfs without a server", "pools:\n- name: n\n  nfs: {export: /e}\n", `line 3: pools[0].nfs.server="": expected a host name`},
		{"server with a path", nfs + "    server: nas:/e\n", `line 5: pools[0].nfs.server="nas:/e"`},
		{"relative export", "pools:\n- name: n\n  nfs:\n    server: s\n    export: e\n", `line 5: pools[0].nfs.export="e": expected the export's absolute path`},
		{"export with dots", "pools:\n- name: n\n  nfs:\n    server: s\n    export: /e/../f\n", `line 5: pools[0].nfs.export="/e/../f"`},
		{"unknown fencing", nfsPool + "    fencing: maybe\n", `line 6: pools[0].nfs.fencing="maybe": expected locks or none`},
		{"outage below the minimum", nfsPool + "    outage: 1s\n", `line 6: pools[0].nfs.outage="1s": expected a time`},
		{"outage without a unit", nfsPool + "    outage: 600\n", `line 6: pools[0].nfs.outage="600": expected a time`},
		{"requireMount of an export", nfsPool + "  requireMount: true\n", "line 6: pools[0].requireMount is for directory pools"},
		{"unknown key of an export", nfsPool + "    expotr: /x\n", "line 6: field expotr is not a key here"},
		{"mount option of mount.nfs", nfsPool + "    mountOptions: [hard, bg]\n", "line 6: pools[0].nfs.mountOptions[1]: "},
		{"mount option in a list with one line per item", nfsPool + "    mountOptions:\n    - hard\n    - addr=10.0.0.1\n", "line 8: pools[0].nfs.mountOptions[1]: "},
		{"mount option bind", nfsPool + "    mountOptions: [bind]\n", "line 6: pools[0].nfs.mountOptions[0]: "},
		{"two NFS versions", nfsPool + "    mountOptions: [nfsvers=4.1, vers=3]\n", "line 6: pools[0].nfs.mountOptions: "},
		{"an nfs pool and a directory pool with one name", nfsPool + "- name: n\n  directory: {path: /b}\n", "line 6: pools[1].name"},
		{"two pools with one export", nfsPool + "- name: m\n  nfs: {server: S, export: /e/}\n", `line 7: pools[1].nfs.export "s:/e": pool "n" already has that location, and pool "m"`},
		{"two pools with one export, with two forms of an IPv6 address", "pools:\n- name: n\n  nfs: {server: \"[fd00::1]\", export: /e}\n- name: m\n  nfs: {server: \"fd00:0::1\", export: /e}\n", `line 5: pools[1].nfs.export "[fd00::1]:/e": pool "n"`},
		{"inline volumes on an export", nfsPool + "  ephemeral: true\n", "line 6: pools[0].ephemeral is for pools of a node"},
		{"ephemeralMemory in percent", pool + "ephemeralMemory: 50%\n", `line 4: ephemeralMemory "50%"`},
		{"ephemeralMemory of 0", pool + "ephemeralMemory: 0\n", `line 4: ephemeralMemory "0"`},
		{"maxVolumesPerNode of 0", pool + "maxVolumesPerNode: 0\n", "line 4: maxVolumesPerNode 0"},
		{"relative kubeletDir", pool + "kubernetes:\n  kubeletDir: var/lib/kubelet\n", `line 5: kubernetes.kubeletDir "var/lib/kubelet"`},
		{"unknown key of forwarding", "forwarding:\n  lisen: \":1\"\n", "line 2: field lisen is not a key here"},
		{"listen without a colon", "forwarding:\n  listen: 9811\n", `line 2: forwarding.listen "9811": must be host:port`},
		{"listen on port 0", "forwarding:\n  listen: \":0\"\n", `line 2: forwarding.listen ":0": must be host:port`},
		{"listen on port 65536", "forwarding:\n  listen: \":65536\"\n", `line 2: forwarding.listen ":65536": must be host:port`},
		{"relative directory of certificates", "forwarding:\n  listen: \":1\"\n  certificates: tls\n", `line 3: forwarding.certificates "tls": must be an absolute path`},
		{"node without a name", forwarding + "  - address: a:1\n", `line 3: forwarding.nodes[0].name "": must be the --node-id`},
		{"node with a name of 257 bytes", forwarding + "  - address: a:1\n    name: " + strings.Repeat("n", 257) + "\n", "line 4: forwarding.nodes[0].name \"nnn"},
		{"two nodes with one name", forwarding + "  - {name: a, address: \"a:1\"}\n  - address: b:1\n    name: a\n", `line 5: forwarding.nodes[1].name "a": another node has that name`},
		{"node address without a port", forwarding + "  - name: a\n    address: a\n", `line 4: forwarding.nodes[0].address "a": must be host:port`},
		{"node address without a host", forwarding + "  - name: a\n    address: \":1\"\n", `line 4: forwarding.nodes[0].address ":1": must be host:port`},
		{"node without an address", forwarding + "  - name: a\n", `line 3: forwarding.nodes[0].address "": must be host:port`},
		{"unknown key of a node", forwarding + "  - {name: a, address: \"a:1\", port: 1}\n", "line 3: field port is not a key here"},
		{"nodes is not a list", "forwarding:\n  nodes: worker\n", "line 2: cannot unmarshal"},
		{"delay without a unit", pool + "kubernetes:\n  nodeLossDelay: 10\n", `line 5: kubernetes.nodeLossDelay "10": must be a time of at least 10s`},
		{"too short delay", pool + "kubernetes:\n  nodeLossDelay: 9s\n", `line 5: kubernetes.nodeLossDelay "9s": must be a time of at least 10s`},
		{"unknown key of kubernetes", pool + "kubernetes:\n  taint: true\n", "line 5: field taint is not a key here"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := driver.ParseConfig([]byte(tc.in), poolKinds)
			if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) || strings.Contains(err.Error(), "type") && strings.Contains(err.Error(), "driver.") {
				t.Errorf("got %+v, error %v, want ErrInvalid with %q and without the name of a Go type", c, err, tc.says)
			}
		})
	}
}

// TestLoadConfig: without an optional file the default applies. Errors name the file.
func TestLoadConfig(t *testing.T) {
	dir := t.TempDir()
	c, err := driver.LoadConfig(filepath.Join(dir, "none.yaml"), true, "/state", poolKinds)
	if err != nil || len(c.Pools) != 1 || c.Pools[0].Directory.Path != "/state/pools/default" {
		t.Errorf("without the optional file: got %+v, error %v, want one pool at /state/pools/default", c, err)
	}
	if _, err := driver.LoadConfig(filepath.Join(dir, "none.yaml"), false, "/state", poolKinds); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the required file: got error %v, want os.ErrNotExist", err)
	}
	file := filepath.Join(dir, "config.yaml")
	must(t, os.WriteFile(file, []byte("pools: 7\n"), 0o600))
	if _, err := driver.LoadConfig(file, false, "/state", poolKinds); err == nil || !strings.Contains(err.Error(), file+": line 1") {
		t.Errorf("got error %v, want one with the file and the line", err)
	}
}

// FuzzConfig: every configuration either is refused with ErrInvalid or has valid pools with different exports.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(goodConfig))
	f.Add([]byte("pools:\n- name: n\n  nfs: {server: \"[::1]\", export: /, mountOptions: [\"nfsvers=4.1,hard\"], outage: 90s}\n"))
	f.Add([]byte("pools: {a: b}"))
	f.Add([]byte("pools:\n- name: a\n  directory: {path: /a}\n  reserve: 9999999999999999Ti\n"))
	f.Add([]byte("&a [*a]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := driver.ParseConfig(b, poolKinds)
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) {
				t.Errorf("%q: got error %v, want ErrInvalid", b, err)
			}
			return
		}
		exports := map[string]bool{}
		for _, p := range c.Pools {
			if p.Shared() {
				direct, err := volume.DirectPool(p.NFS.Server, p.NFS.Export)
				if err == nil && exports[direct] {
					t.Errorf("%q: two pools have the export %s", b, direct)
				}
				exports[direct] = true
			}
			if !volume.ValidPoolName(p.Name) || p.Shared() == filepath.IsAbs(p.Directory.Path) {
				t.Errorf("%q: the invalid pool %+v was accepted", b, p)
			}
		}
	})
}

// TestForwardingSection: the section forwarding of nodes and of the controller, with and without optional keys.
func TestForwardingSection(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want driver.Forwarding
		dir  string
	}{
		{"forwarding: {listen: \":9811\"}\n", driver.Forwarding{Listen: ":9811"}, "/state/certificates"},
		{"forwarding: {listen: \"[::1]:9811\", certificates: /tls}\n", driver.Forwarding{Listen: "[::1]:9811", Certificates: "/tls"}, "/tls"},
		{
			"forwarding:\n  nodes: [{name: a, address: \"a:1\"}, {name: b.example, address: \"10.0.0.2:1\"}]\n",
			driver.Forwarding{Nodes: []driver.ForwardingNode{{Name: "a", Address: "a:1"}, {Name: "b.example", Address: "10.0.0.2:1"}}},
			"/state/certificates",
		},
		{"forwarding: {}\n", driver.Forwarding{}, "/state/certificates"},
	} {
		c, err := driver.ParseConfig([]byte(tc.in), poolKinds)
		if err != nil || !reflect.DeepEqual(*c.Forwarding, tc.want) || c.Forwarding.CertificatesDir("/state") != tc.dir {
			t.Errorf("%s: got %+v, error %v, want %+v with certificates in %s", tc.in, c.Forwarding, err, tc.want, tc.dir)
		}
	}
}
