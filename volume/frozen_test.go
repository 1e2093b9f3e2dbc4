package volume_test

import (
	"testing"
	"time"

	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
)

// TestFrozenIDs: IDs are parsed and formatted as in every earlier version.
func TestFrozenIDs(t *testing.T) {
	inline := "csi-" + "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for text, tc := range map[string]struct {
		parse func(string) (volume.ID, error)
		want  volume.ID
	}{
		"loop:ssd.0a1b2c3d:pvc-1": {volume.ParseID, volume.ID{Backend: "loop", Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "pvc-1"}},
		"loop:nas:pvc-1":          {volume.ParseID, volume.ID{Backend: "loop", Pool: "nas", Name: "pvc-1"}},
		"nfs:nas:pvc-1":           {volume.ParseID, volume.ID{Backend: "nfs", Pool: "nas", Name: "pvc-1"}},
		"nfs:=server.example=/export/a%20b:pvc-1": {
			volume.ParseID, volume.ID{Backend: "nfs", Pool: "=server.example=/export/a%20b", Name: "pvc-1"},
		},
		"nfs:=fd00%3a%3a1=/export:pvc-1": {volume.ParseID, volume.ID{Backend: "nfs", Pool: "=fd00%3a%3a1=/export", Name: "pvc-1"}},
		"local:ssd.0a1b2c3d:pvc-1":       {volume.ParseID, volume.ID{Backend: "local", Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "pvc-1"}},
		"disk:disks.0a1b2c3d:pvc-1":      {volume.ParseID, volume.ID{Backend: "disk", Pool: "disks", PoolUUID: "0a1b2c3d", Name: "pvc-1"}},
		"loop:ssd.0a1b2c3d:snap-1":       {volume.ParseSnapshotID, volume.ID{Backend: "loop", Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "snap-1"}},
		"loop:ssd.0a1b2c3d:group-1.007":  {volume.ParseSnapshotID, volume.ID{Backend: "loop", Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "group-1.007"}},
		"loop:ssd.0a1b2c3d:group-1.group": {
			volume.ParseGroupID, volume.ID{Backend: "loop", Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "group-1.group"},
		},
		"loop:ssd.0a1b2c3d:" + inline: {parseRecorded, volume.ID{Backend: "loop", Pool: "ssd", PoolUUID: "0a1b2c3d", Name: inline}},
	} {
		if got, err := tc.parse(text); err != nil || got != tc.want {
			t.Errorf("%s is parsed as %+v, %v; want %+v", text, got, err, tc.want)
		}
		if got := tc.want.String(); got != text {
			t.Errorf("got ID %s, want %s", got, text)
		}
	}
	if !volume.InlineID(inline) {
		t.Errorf("%s is not the ID of an inline volume", inline)
	}
}

// parseRecorded parses an ID as in a record.
func parseRecorded(text string) (id volume.ID, err error) { return id, id.UnmarshalText([]byte(text)) }

// TestFrozenNames: the names in IDs are derived as in every earlier version.
func TestFrozenNames(t *testing.T) {
	pool, err := volume.DirectPool("[FD00::1]", "/export/a b/")
	must(t, err)
	for _, tc := range []struct{ got, want string }{
		{volume.NameFor("pvc-1"), "pvc-1"},
		{volume.NameFor("My Volume"), "h-f436f1b4e06fc9f390b2f6479707ff47ea11e1b3c096ddf0d50ef2ff095b"},
		{volume.GroupName("group-1"), "group-1.group"},
		{volume.MemberName("group-1.group", 7), "group-1.007"},
		{volume.SetOf("group-1.007"), "group-1.group"},
		{volume.SetOf("snap-1"), "snap-1"},
		{pool, "=fd00%3a%3a1=/export/a%20b"},
	} {
		if tc.got != tc.want {
			t.Errorf("got %s, want %s", tc.got, tc.want)
		}
	}
}

var frozenTime = time.Date(2026, 1, 2, 3, 4, 5, 678901234, time.UTC)

func id(backend, pool, uuid, name string) volume.ID {
	return volume.ID{Backend: backend, Pool: pool, PoolUUID: uuid, Name: name}
}

// TestFrozenVolumes: the records of volumes do not change. The sections of kinds are tested in their packages.
func TestFrozenVolumes(t *testing.T) {
	frozen.Format[volume.Volume]{
		Dir: "volumes", Read: forms.ParseVolume, Write: volume.Volume.MarshalRecord,
	}.Test(t, map[string]volume.Volume{
		"image": {
			Version: 1, ID: id("loop", "nas", "", "pvc-1"), CoName: "PVC 1", Capacity: 1 << 30, FSType: "ext4", SectorSize: 4096,
			MkfsOptions: []string{"-m", "0"}, Section: &section{"thin"}, CreationID: "0a1b2c3d-0123-4567-89ab-0123456789ab", Namespace: "team-a",
			Source: &volume.Source{Snapshot: true, ID: id("loop", "nas", "", "snap-1")}, Created: frozenTime,
		},
		"block": {
			Version: 1, ID: id("disk", "disks", "0a1b2c3d", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, Block: true, SectorSize: 512, Created: frozenTime,
			Source: &volume.Source{ID: id("disk", "disks", "0a1b2c3d", "pvc-0")},
		},
		"inline": {
			Version: 1, ID: id("loop", "ssd", "0a1b2c3d", "csi-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"),
			CoName: "csi-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", Capacity: 1 << 20, FSType: "xfs", SectorSize: 4096,
			Section: &section{"thin"}, Created: frozenTime,
			Ephemeral: &volume.Ephemeral{Target: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount", Pod: volume.Pod{Namespace: "n", Name: "p", UID: "u"}},
		},
		"export-directory": {
			Version: 1, ID: id("nfs", "nas", "", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, CreationID: "0a1b2c3d-0123-4567-89ab-0123456789ab", Created: frozenTime,
			Directory: &volume.Directory{SubDir: "team-a/pvc-1", OnDelete: volume.OnDeleteRetain, Mode: 0o2770, UID: 1000, GID: 2000},
		},
		"encrypted": {
			Version: 1, ID: id("loop", "ssd", "0a1b2c3d", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, FSType: "xfs", SectorSize: 4096, Created: frozenTime,
			Encryption: encryption, Section: &section{"thin"},
		},
		"limited": {
			Version: 1, ID: id("loop", "ssd", "0a1b2c3d", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, FSType: "ext4", SectorSize: 4096, Created: frozenTime,
			IOLimits: &volume.IOLimits{ReadIOPS: 100, WriteIOPS: 200, ReadBytes: 1 << 20, WriteBytes: 2 << 20}, Section: &section{"thin"},
		},
		"limits-removed": {
			Version: 1, ID: id("disk", "disks", "0a1b2c3d", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, Block: true, SectorSize: 512, Created: frozenTime,
			IOLimits: &volume.IOLimits{},
		},
		"direct-export-directory": {
			Version: 1, ID: id("nfs", "=server.example=/export", "", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, Created: frozenTime,
			Directory: &volume.Directory{OnDelete: volume.OnDeleteArchive, Mode: 0o755},
		},
		"local-directory": {
			Version: 1, ID: id("local", "ssd", "0a1b2c3d", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, Created: frozenTime,
			Directory: &volume.Directory{OnDelete: volume.OnDeleteDelete, Mode: 0o755, Quota: &volume.Quota{Kind: "btrfs-simple", ID: 1 << 40}},
			Source: &volume.Source{
				Snapshot: true, ID: id("local", "ssd", "0a1b2c3d", "group-1.001"), Shared: 1 << 20, Owners: []volume.ID{id("local", "ssd", "0a1b2c3d", "pvc-0")},
			},
		},
	})
}

// encryption is the encryption of frozen records.
var encryption = &volume.Encryption{
	Type: volume.EncryptionLUKS2, Cipher: "aes-xts-plain64", KeySize: 512, SectorSize: 4096, DataOffset: 16 << 20, Derivation: "argon2id", Memory: 32768, Iterations: 4,
}

// TestFrozenSnapshots: the records of snapshots and groups do not change.
func TestFrozenSnapshots(t *testing.T) {
	image := func(name string) volume.Snapshot {
		return volume.Snapshot{
			ID: id("loop", "ssd", "0a1b2c3d", name), Source: id("loop", "ssd", "0a1b2c3d", "pvc-1"), Size: 1 << 30, Bytes: 1 << 20, Shared: true,
			FSType: "ext4", SectorSize: 4096, Formatted: true,
		}
	}
	block := image("group-1.001")
	block.Source.Name, block.Block, block.FSType, block.SectorSize, block.Formatted = "pvc-2", true, "", 512, false
	encrypted := image("snap-1")
	encrypted.Encryption = encryption
	frozen.Format[volume.SnapshotSet]{
		Dir: "snapshots", Read: forms.ParseSnapshotSet, Write: volume.SnapshotSet.Marshal,
	}.Test(t, map[string]volume.SnapshotSet{
		"image": {
			Version: 1, ID: id("loop", "ssd", "0a1b2c3d", "snap-1"), CoName: "Snap 1", Created: frozenTime, Snapshots: []volume.Snapshot{image("snap-1")},
		},
		"group": {
			Version: 1, ID: id("loop", "ssd", "0a1b2c3d", "group-1.group"), CoName: "group-1", Created: frozenTime,
			Snapshots: []volume.Snapshot{image("group-1.000"), block}, CreationID: "0a1b2c3d-0123-4567-89ab-0123456789ab",
		},
		"encrypted": {
			Version: 1, ID: id("loop", "ssd", "0a1b2c3d", "snap-1"), CoName: "Snap 1", Created: frozenTime, Snapshots: []volume.Snapshot{encrypted},
		},
		"directory": {
			Version: 1, ID: id("local", "ssd", "0a1b2c3d", "snap-1"), CoName: "snap-1", Created: frozenTime,
			Snapshots: []volume.Snapshot{{
				ID: id("local", "ssd", "0a1b2c3d", "snap-1"), Source: id("local", "ssd", "0a1b2c3d", "pvc-1"), Size: 1 << 30, Bytes: 1 << 20,
				Shared: true, Owners: []volume.ID{id("local", "ssd", "0a1b2c3d", "pvc-0")}, Directory: true,
			}},
		},
	})
}

// TestFrozenContext: the attributes that users write in pods, classes of snapshots and calls of FlexVolume keep their
// names and values.
func TestFrozenContext(t *testing.T) {
	got, err := volume.ParseInline(map[string]string{
		"size": "1Gi", "pool": "ssd", "fsType": "xfs", "csi.storage.k8s.io/ephemeral": "true",
		"csi.storage.k8s.io/pod.namespace": "n", "csi.storage.k8s.io/pod.name": "p", "csi.storage.k8s.io/pod.uid": "u",
	})
	if want := (volume.Inline{Size: 1 << 30, Pool: "ssd", FSType: "xfs", Pod: volume.Pod{Namespace: "n", Name: "p", UID: "u"}}); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	memory, err := volume.ParseInline(map[string]string{"size": "1Mi", "medium": "memory"})
	if want := (volume.Inline{Size: 1 << 20, Memory: true}); err != nil || memory != want {
		t.Errorf("got %+v, %v; want %+v", memory, err, want)
	}
	for value, want := range map[string]volume.Consistency{"crash": volume.ConsistencyCrash, "frozen": volume.ConsistencyFrozen} {
		if p, err := volume.ParseSnapshotParameters(map[string]string{"consistency": value}); err != nil || p.Consistency != want {
			t.Errorf("consistency %s: got %+v, %v", value, p, err)
		}
	}
	namespace, err := volume.ParseNamespaceChange(map[string]string{"csi.trivet.dev/namespace": "a"})
	if err != nil || namespace != "a" {
		t.Errorf("got %q, %v; want a", namespace, err)
	}
}
