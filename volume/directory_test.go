package volume_test

import (
	"errors"
	"path"
	"reflect"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

func ptr(n uint32) *uint32 { return &n }

// directoryRecord returns a valid record of a directory on an export.
func directoryRecord() volume.Volume {
	return volume.Volume{
		Version: volume.RecordVersion, ID: volume.ID{Backend: "nfs", Pool: "nas", Name: "v"},
		CoName: "v", Capacity: 1 << 30, CreationID: "t",
		Directory: &volume.Directory{SubDir: "team/claim", OnDelete: volume.OnDeleteDelete, Mode: 0o770, UID: 1000, GID: 2000},
	}
}

// TestDirectPool: different forms of one export have the same name, from which the export can be parsed.
func TestDirectPool(t *testing.T) {
	for _, tc := range []struct {
		name, server, share string
		want                string // if it is empty, DirectPool must fail
	}{
		{"name", "nas.lan", "/tank/volumes", "=nas.lan=/tank/volumes"},
		{"upper case", "NAS.Lan", "/Tank", "=nas.lan=/Tank"},
		{"trailing slash", "nas", "/tank/", "=nas=/tank"},
		{"root", "nas", "/", "=nas=/"},
		{"IPv4", "192.0.2.1", "/t", "=192.0.2.1=/t"},
		{"IPv6", "fd00::1", "/t", "=fd00%3a%3a1=/t"},
		{"IPv6 in brackets, long", "[FD00:0:0:0:0:0:0:1]", "/t", "=fd00%3a%3a1=/t"},
		{"escaped characters", "nas", "/a b/ü=%", "=nas=/a%20b/%c3%bc%3d%25"},
		{"no server", "", "/t", ""},
		{"server with a port", "nas:2049", "/t", ""},
		{"server with a path", "nas/t", "/t", ""},
		{"open bracket", "[fd00::1", "/t", ""},
		{"name in brackets", "[nas]", "/t", ""},
		{"no share", "nas", "", ""},
		{"relative", "nas", "t", ""},
		{"parent directory", "nas", "/t/..", ""},
		{"empty part", "nas", "/a//b", ""},
		{"newline", "nas", "/a\nb", ""},
		{"long share", "nas", "/" + strings.Repeat("x", 60), "=nas=/" + strings.Repeat("x", 60)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := volume.DirectPool(tc.server, tc.share)
			if got != tc.want || (err == nil) != (tc.want != "") || err != nil && !errors.Is(err, volume.ErrInvalid) {
				t.Fatalf("DirectPool(%q, %q) = %q, %v; want %q", tc.server, tc.share, got, err, tc.want)
			}
			if err != nil {
				return
			}
			server, share, ok := volume.ParseDirectPool(got)
			if again, err := volume.DirectPool(server, share); !ok || again != got || err != nil {
				t.Errorf("ParseDirectPool(%q) = %q, %q, %t, whose DirectPool is %q, %v", got, server, share, ok, again, err)
			}
			if volume.ValidPoolName(got) {
				t.Errorf("ValidPoolName(%q) = true, want false", got)
			}
		})
	}
}

// FuzzDirectPool: the name of a direct pool can be parsed, alone and in an ID that is not too long.
func FuzzDirectPool(f *testing.F) {
	f.Add("nas.lan", "/tank")
	f.Add("fd00::1%eth0", "/a b")
	f.Add("[::1]", "/=%")
	f.Fuzz(func(t *testing.T, server, share string) {
		name, err := volume.DirectPool(server, share)
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) {
				t.Errorf("%v is not ErrInvalid", err)
			}
			return
		}
		if s, p, ok := volume.ParseDirectPool(name); !ok || !path.IsAbs(p) || s == "" {
			t.Errorf("ParseDirectPool(%q) = %q, %q, %t; want server %q and share %q", name, s, p, ok, server, share)
		}
		id := volume.ID{Backend: "loop", Pool: name, Name: strings.Repeat("n", 63)}
		got, err := volume.ParseID(id.String())
		if fits := len(id.String()) <= volume.MaxIDLength; fits && (err != nil || got != id || !got.Shared()) || !fits && err == nil {
			t.Errorf("ParseID(%q) = %+v, %v; want %+v, or an error if the text is too long", id, got, err, id)
		}
	})
}

// TestCheckID: an export is refused if its name makes the volume's ID too long.
func TestCheckID(t *testing.T) {
	for _, tc := range []struct {
		share string
		ok    bool
	}{{"/tank", true}, {"/" + strings.Repeat("x", 100), false}} {
		pool, err := volume.DirectPool("nas", tc.share)
		must(t, err)
		params := volume.Parameters{Backend: "nfs", Pool: pool}
		err = volume.Spec{CoName: "pvc-0d1e2f3a-4b5c-6d7e-8f90-a1b2c3d4e5f6", Parameters: params}.CheckID()
		if (err == nil) != tc.ok || !tc.ok && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), "pool")) {
			t.Errorf("share %q: got %v, want success: %t", tc.share, err, tc.ok)
		}
	}
}

// TestDirectoryParameters: parameters of directories are parsed, and the variables in subDir are replaced.
func TestDirectoryParameters(t *testing.T) {
	for _, tc := range []struct {
		name   string
		in     map[string]string
		subDir string
		want   volume.DirectoryParameters // without SubDir
		says   string                     // text in the error of ExpandSubDir; if it is empty, there must be no error
	}{
		{"no parameters", nil, "", volume.DirectoryParameters{}, ""},
		{
			"all",
			map[string]string{"subDir": "a/b", "onDelete": "archive", "mode": "2770", "uid": "0", "gid": "4294967294"},
			"a/b",
			volume.DirectoryParameters{OnDelete: volume.OnDeleteArchive, Mode: ptr(0o2770), UID: ptr(0), GID: ptr(4294967294)},
			"",
		},
		{"mountPermissions 0 does not change the mode", map[string]string{"mountPermissions": "0"}, "", volume.DirectoryParameters{}, ""},
		{"mountPermissions sets the mode", map[string]string{"mountPermissions": "0755"}, "", volume.DirectoryParameters{Mode: ptr(0o755)}, ""},
		{"mode and mountPermissions are equal", map[string]string{"mountPermissions": "0755", "mode": "755"}, "", volume.DirectoryParameters{Mode: ptr(0o755)}, ""},
		{"mode 0", map[string]string{"mode": "0"}, "", volume.DirectoryParameters{Mode: ptr(0)}, ""},
		{"all variables", map[string]string{
			"subDir":                           "${pvc.metadata.namespace}/${pvc.metadata.name}/${pv.metadata.name}",
			"csi.storage.k8s.io/pvc/name":      "claim",
			"csi.storage.k8s.io/pv/name":       "pvc-1",
			"csi.storage.k8s.io/pvc/namespace": "team",
		}, "team/claim/pvc-1", volume.DirectoryParameters{}, ""},
		{"variable without a value", map[string]string{"subDir": "${pvc.metadata.name}"}, "", volume.DirectoryParameters{}, "--extra-create-metadata"},
		{"unknown variable", map[string]string{"subDir": "${pvc.metadata.uid}"}, "", volume.DirectoryParameters{}, "the known ones are"},
		{"incomplete variable", map[string]string{"subDir": "x${"}, "", volume.DirectoryParameters{}, "the known ones are"},
		{"claim is named ..", map[string]string{"subDir": "${pvc.metadata.name}", "csi.storage.k8s.io/pvc/name": ".."}, "", volume.DirectoryParameters{}, "not a valid directory name"},
		{"name of the claim contains slashes", map[string]string{"subDir": "${pvc.metadata.name}", "csi.storage.k8s.io/pvc/name": "a/../.."}, "", volume.DirectoryParameters{}, "not a valid directory name"},
		{"name of the claim is a variable", map[string]string{"subDir": "${pvc.metadata.name}", "csi.storage.k8s.io/pvc/name": "${pv.metadata.name}", "csi.storage.k8s.io/pv/name": "x"}, "", volume.DirectoryParameters{}, "the known ones are"},
		{"component begins with .. after expansion", map[string]string{"subDir": "a/.${pvc.metadata.name}", "csi.storage.k8s.io/pvc/name": ".x"}, "a/..x", volume.DirectoryParameters{}, ""},
		{"outside the pool", map[string]string{"subDir": "../x"}, "", volume.DirectoryParameters{}, "without . and .."},
		{"retained without a namespace", map[string]string{"onDelete": "retain", "subDir": "shared/${pvc.metadata.name}", "csi.storage.k8s.io/pvc/name": "claim"}, "", volume.DirectoryParameters{OnDelete: volume.OnDeleteRetain}, "${pvc.metadata.namespace}"},
		{"retained with a namespace that is part of a component", map[string]string{"onDelete": "retain", "subDir": "${pvc.metadata.namespace}-${pvc.metadata.name}", "csi.storage.k8s.io/pvc/namespace": "a", "csi.storage.k8s.io/pvc/name": "b-c"}, "", volume.DirectoryParameters{OnDelete: volume.OnDeleteRetain}, "${pvc.metadata.namespace}"},
		{"retained with a namespace", map[string]string{"onDelete": "retain", "subDir": "x/${pvc.metadata.namespace}", "csi.storage.k8s.io/pvc/namespace": "a"}, "x/a", volume.DirectoryParameters{OnDelete: volume.OnDeleteRetain}, ""},
		{"retained with the name of the volume", map[string]string{"onDelete": "retain", "subDir": "x-${pv.metadata.name}", "csi.storage.k8s.io/pv/name": "pvc-1"}, "x-pvc-1", volume.DirectoryParameters{OnDelete: volume.OnDeleteRetain}, ""},
		{"reserved path", map[string]string{"subDir": "volumes/${pv.metadata.name}", "csi.storage.k8s.io/pv/name": "x"}, "", volume.DirectoryParameters{}, "used by the pool itself"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := volume.Parameters{Values: tc.in}.Directory()
			must(t, err)
			if d.OnDelete != tc.want.OnDelete || !reflect.DeepEqual([]*uint32{d.Mode, d.UID, d.GID}, []*uint32{tc.want.Mode, tc.want.UID, tc.want.GID}) {
				t.Errorf("got %+v, want %+v", d, tc.want)
			}
			got, err := d.ExpandSubDir()
			if tc.says == "" && (err != nil || got != tc.subDir) {
				t.Errorf("ExpandSubDir() = %q, %v; want %q", got, err, tc.subDir)
			}
			if tc.says != "" && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("ExpandSubDir: got %v, want %q in the error", err, tc.says)
			}
		})
	}
}

// TestCheckSubDir: only paths inside the pool that are not reserved for the driver are accepted.
func TestCheckSubDir(t *testing.T) {
	for _, good := range []string{"a", "a/b c/ü", "..a/b..", "volume", "data/volumes", "a/.trivet", ".hidden"} {
		if err := volume.CheckSubDir(good); err != nil {
			t.Errorf("CheckSubDir(%q) = %v, want nil", good, err)
		}
	}
	for _, bad := range []string{
		"", ".", "..", "/a", "a/", "a//b", "./a", "a/..", "../a", "a/../../b", "a\nb", "a\x00", "\x7f",
		"volumes", "volumes/x", "archived/x", "retained", "snapshots", "groups/x", "pool.json", "pool.json/x", ".trivet", ".trivet/tmp/x", "lost+found",
		strings.Repeat("a", 256), strings.Repeat("a/", 600) + "a",
	} {
		if err := volume.CheckSubDir(bad); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("CheckSubDir(%q) = %v, want ErrInvalid", bad, err)
		}
	}
}

// FuzzSubDir: for all names of claims, the resulting directory is inside the pool and not reserved.
func FuzzSubDir(f *testing.F) {
	f.Add("${pvc.metadata.namespace}/${pvc.metadata.name}", "team", "claim", "pv")
	f.Add("a/${pv.metadata.name}", "", "", "..")
	f.Add(".${pvc.metadata.name}/x", "", ".", "")
	f.Fuzz(func(t *testing.T, subDir, namespace, claim, pv string) {
		d, err := volume.Parameters{Values: map[string]string{
			"subDir": subDir, "csi.storage.k8s.io/pvc/namespace": namespace,
			"csi.storage.k8s.io/pvc/name": claim, "csi.storage.k8s.io/pv/name": pv,
		}}.Directory()
		must(t, err)
		got, err := d.ExpandSubDir()
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) {
				t.Errorf("%v is not ErrInvalid", err)
			}
			return
		}
		if subDir == "" {
			if got != "" {
				t.Errorf("an empty subDir expanded to %q", got)
			}
			return
		}
		first, _, _ := strings.Cut(got, "/")
		below := path.Join("/pool", got)
		if below != "/pool/"+got || first == "volumes" || first == ".trivet" || first == "pool.json" || strings.ContainsAny(got, "\x00\n") {
			t.Errorf("subDir %q expanded to %q, which is outside the pool or reserved", subDir, got)
		}
	})
}

// TestDirectoryRecordRefuses: invalid records, which any client of the export can write, are refused.
func TestDirectoryRecordRefuses(t *testing.T) {
	wantDamaged(t, directoryRecord, map[string]func(*volume.Volume){
		"parent directory":  func(v *volume.Volume) { v.Directory.SubDir = "../../etc" },
		"absolute path":     func(v *volume.Volume) { v.Directory.SubDir = "/etc" },
		"of another volume": func(v *volume.Volume) { v.Directory.SubDir = "volumes/other/data" },
		"in the trash":      func(v *volume.Volume) { v.Directory.SubDir = ".trivet/trash" },
		"the whole pool":    func(v *volume.Volume) { v.Directory.SubDir = "." },
		"no onDelete":       func(v *volume.Volume) { v.Directory.OnDelete = "" },
		"unknown onDelete":  func(v *volume.Volume) { v.Directory.OnDelete = "shred" },
		"invalid mode":      func(v *volume.Volume) { v.Directory.Mode = 0o10000 },
		"a raw device":      func(v *volume.Volume) { v.Block = true },
		"a filesystem":      func(v *volume.Volume) { v.FSType = "ext4" },
		"sector size":       func(v *volume.Volume) { v.SectorSize = 512 },
		"a section":         func(v *volume.Volume) { v.Section = &section{"thin"} },
		"mkfs options":      func(v *volume.Volume) { v.MkfsOptions = []string{"-m", "1"} },
		"backend of images": func(v *volume.Volume) { v.ID.Backend = "loop" },
		"no capacity":       func(v *volume.Volume) { v.Capacity = 0 },
	})
}

// TestDirectorySatisfies: a directory satisfies a request unless a value in the request differs from its record.
func TestDirectorySatisfies(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   map[string]string
		says string // text in the error; if it is empty, the volume must satisfy the request
	}{
		{"same values", map[string]string{"subDir": "team/claim", "onDelete": "delete", "mode": "770", "uid": "1000", "gid": "2000"}, ""},
		{"values not specified", map[string]string{"subDir": "team/claim"}, ""},
		{"subDir with a variable", map[string]string{"subDir": "${pvc.metadata.namespace}/claim", "csi.storage.k8s.io/pvc/namespace": "team"}, ""},
		{"another directory", map[string]string{"subDir": "team/other"}, "subDir"},
		{"no subDir", nil, "subDir"},
		{"onDelete", map[string]string{"subDir": "team/claim", "onDelete": "archive"}, "onDelete"},
		{"mode", map[string]string{"subDir": "team/claim", "mode": "0777"}, "mode"},
		{"uid", map[string]string{"subDir": "team/claim", "uid": "1"}, "uid"},
		{"gid", map[string]string{"subDir": "team/claim", "gid": "1"}, "gid"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := volume.Parameters{Backend: "nfs", Values: tc.in}
			err := directoryRecord().Satisfies(volume.Spec{
				CoName: "v", Capacity: volume.Range{Required: 1 << 30}, Parameters: p,
				Capabilities: []volume.Capability{{Mode: volume.MultiNodeMultiWriter}},
			})
			if (err == nil) != (tc.says == "") || err != nil && (!errors.Is(err, volume.ErrIncompatible) || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("got %v, want %q in the error", err, tc.says)
			}
		})
	}
}

// TestQuotaRecord: a record keeps the limit of a node-local directory. An invalid limit
// is refused.
func TestQuotaRecord(t *testing.T) {
	local := func(q *volume.Quota) volume.Volume {
		v := directoryRecord()
		v.ID = volume.ID{Backend: "local", Pool: "p", PoolUUID: "01234567", Name: "v"}
		v.CreationID, v.Directory.Quota = "", q
		return v
	}
	shared := directoryRecord()
	shared.Directory.Quota = &volume.Quota{Kind: "xfs-project", ID: 1}
	withoutNode := local(nil)
	withoutNode.ID.PoolUUID = ""
	for _, tc := range []struct {
		name string
		v    volume.Volume
		ok   bool
	}{
		{"no limit", local(nil), true},
		{"limit", local(&volume.Quota{Kind: "btrfs-simple", ID: 1 << 40}), true},
		{"no ID", local(&volume.Quota{Kind: "xfs-project"}), false},
		{"no kind", local(&volume.Quota{ID: 1}), false},
		{"invalid kind", local(&volume.Quota{Kind: "../x", ID: 1}), false},
		{"on an export", shared, false},
		{"in a shared pool", withoutNode, false},
	} {
		got, err := parse(t, tc.v)
		if (err == nil) != tc.ok || err != nil && !errors.Is(err, volume.ErrDamaged) || err == nil && !reflect.DeepEqual(got, tc.v) {
			t.Errorf("%s: got %+v, %v; want success: %t", tc.name, got, err, tc.ok)
		}
	}
}
