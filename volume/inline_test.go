package volume_test

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// inlineID is a valid ID of an inline volume.
var inlineID = "csi-" + strings.Repeat("0123456789abcdef", 4)

// TestInlineID: only IDs in the format of the kubelet are IDs of inline volumes. No such ID is also a valid volume ID
// or name.
func TestInlineID(t *testing.T) {
	if !volume.InlineID(inlineID) {
		t.Errorf("InlineID(%q) = false, want true", inlineID)
	}
	for _, id := range []string{"", "csi-", inlineID[:67], inlineID + "0", "csi-" + strings.Repeat("g", 64), strings.ToUpper(inlineID), inlineID + "\n", "loop:p.01234567:" + inlineID} {
		if volume.InlineID(id) {
			t.Errorf("InlineID(%q) = true, want false", id)
		}
		if got, err := volume.ParseID(id); err == nil {
			t.Errorf("ParseID(%q) = %v, want an error", id, got)
		}
	}
	if name := volume.NameFor(inlineID); volume.InlineID(name) {
		t.Errorf("NameFor(%q) = %q, which is the ID of an inline volume", inlineID, name)
	}
}

// kubeletContext is the part of a volume context that a kubelet adds.
var kubeletContext = map[string]string{
	"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "p", "csi.storage.k8s.io/pod.namespace": "ns",
	"csi.storage.k8s.io/pod.uid": "u", "csi.storage.k8s.io/serviceAccount.name": "default",
}

// TestParseInline: only the known attributes are accepted, and an error contains at most a part of a long value.
func TestParseInline(t *testing.T) {
	pod := volume.Pod{Namespace: "ns", Name: "p", UID: "u"}
	for _, tc := range []struct {
		name string
		in   map[string]string
		want volume.Inline
		says string // text in the error; if it is empty, there must be no error
	}{
		{"size alone", map[string]string{"size": "1Gi"}, volume.Inline{Size: 1 << 30, Pod: pod}, ""},
		{"bytes", map[string]string{"size": "1"}, volume.Inline{Size: 1, Pod: pod}, ""},
		{
			"all of an image",
			map[string]string{"size": "1Gi", "pool": "fast", "fsType": "xfs"},
			volume.Inline{Size: 1 << 30, Pool: "fast", FSType: "xfs", Pod: pod},
			"",
		},
		{"memory", map[string]string{"size": "1Mi", "medium": "memory"}, volume.Inline{Size: 1 << 20, Memory: true, Pod: pod}, ""},

		{"nothing", nil, volume.Inline{}, "volume_context.size is missing"},
		{"memory without a size", map[string]string{"medium": "memory"}, volume.Inline{}, "volume_context.size is missing"},
		{"empty size", map[string]string{"size": ""}, volume.Inline{}, `volume_context.size=""`},
		{"zero bytes", map[string]string{"size": "0"}, volume.Inline{}, `size="0"`},
		{"zero with a unit", map[string]string{"size": "0Ti"}, volume.Inline{}, `size="0Ti"`},
		{"negative", map[string]string{"size": "-1"}, volume.Inline{}, `size="-1"`},
		{"too large a number", map[string]string{"size": "9223372036854775808"}, volume.Inline{}, "expected a size above zero"},
		{"too many Ti", map[string]string{"size": "9223372036854775807Ti"}, volume.Inline{}, "expected a size above zero"},
		{"percentage", map[string]string{"size": "50%"}, volume.Inline{}, `size="50%"`},
		{"option in a size", map[string]string{"size": "1Gi,mode=04777"}, volume.Inline{}, "size="},
		{"path as the pool", map[string]string{"size": "1Gi", "pool": "../../etc"}, volume.Inline{}, `pool="../../etc"`},
		{"export as the pool", map[string]string{"size": "1Gi", "pool": "=nas=/tank"}, volume.Inline{}, "pool="},
		{"empty pool", map[string]string{"size": "1Gi", "pool": ""}, volume.Inline{}, `pool=""`},
		{"backend", map[string]string{"size": "1Gi", "backend": "local"}, volume.Inline{}, `"backend" is unknown`},
		{"unknown filesystem", map[string]string{"size": "1Gi", "fsType": "vfat"}, volume.Inline{}, `fsType="vfat"`},
		{"unknown medium", map[string]string{"size": "1Gi", "medium": "disk"}, volume.Inline{}, `medium="disk"`},
		{"pool in memory", map[string]string{"size": "1Gi", "medium": "memory", "pool": "fast"}, volume.Inline{}, `pool="fast" is not possible for a volume in memory`},
		{"filesystem in memory", map[string]string{"size": "1Gi", "medium": "memory", "fsType": "xfs"}, volume.Inline{}, "fsType"},
		{"server", map[string]string{"size": "1Gi", "server": "evil", "share": "/"}, volume.Inline{}, `volume_context."server" is unknown: an inline volume has the volumeAttributes size, pool, fsType, medium`},
		{"mount options", map[string]string{"size": "1Gi", "mountOptions": "suid"}, volume.Inline{}, `"mountOptions" is unknown`},
		{"mkfs options", map[string]string{"size": "1Gi", "mkfsOptions": "-d /etc"}, volume.Inline{}, `"mkfsOptions" is unknown`},
		{"parameter of directories", map[string]string{"size": "1Gi", "subDir": "x"}, volume.Inline{}, `"subDir" is unknown`},
		{"upper case", map[string]string{"Size": "1Gi"}, volume.Inline{}, `"Size" is unknown`},
		{"long key", map[string]string{strings.Repeat("k", 5000): "1Gi"}, volume.Inline{}, "is unknown"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := maps.Clone(kubeletContext)
			maps.Copy(in, tc.in)
			got, err := volume.ParseInline(in)
			if tc.says == "" {
				if err != nil || got != tc.want {
					t.Errorf("got %+v, %v; want %+v", got, err, tc.want)
				}
				return
			}
			if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) || len(err.Error()) > 400 {
				t.Errorf("got %v, want %q in an error of at most 400 bytes", err, tc.says)
			}
		})
	}
}

// inlineRecord returns a valid record of an inline volume.
func inlineRecord() volume.Volume {
	v := record()
	v.ID.Name, v.CoName = inlineID, inlineID
	v.Ephemeral = &volume.Ephemeral{Target: "/pods/u/mount", Pod: volume.Pod{Namespace: "ns", Name: "p", UID: "u"}}
	return v
}

// TestInlineRecordRefuses: a record whose ID and field ephemeral contradict each other is refused.
func TestInlineRecordRefuses(t *testing.T) {
	wantDamaged(t, inlineRecord, map[string]func(*volume.Volume){
		"not marked as inline": func(v *volume.Volume) { v.Ephemeral = nil },
		"another volume's ID":  func(v *volume.Volume) { v.ID.Name = "v" },
		"in a shared pool":     func(v *volume.Volume) { v.ID.PoolUUID = "" },
	})
}

// FuzzInline: an accepted context has a size, and otherwise only values from closed lists and names
// of pools.
func FuzzInline(f *testing.F) {
	f.Add("1Gi", "fast", "xfs", "", "", "")
	f.Add("1", "", "", "memory", "mkfsOptions", "-d /etc")
	f.Add("-1", "../x", "vfat", "disk", "csi.storage.k8s.io/x", "y")
	f.Fuzz(func(t *testing.T, size, pool, fsType, medium, key, value string) {
		context := map[string]string{key: value}
		for k, v := range map[string]string{"size": size, "pool": pool, "fsType": fsType, "medium": medium} {
			if v != "" {
				context[k] = v
			}
		}
		in, err := volume.ParseInline(context)
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) {
				t.Errorf("%v: %v is not ErrInvalid", context, err)
			}
			return
		}
		switch {
		case in.Size <= 0,
			in.Pool != "" && !volume.ValidPoolName(in.Pool),
			in.FSType != "" && !volume.ValidFSType(in.FSType),
			in.Memory && (in.Pool != "" || in.FSType != ""):
			t.Errorf("ParseInline(%v) = %+v, which has invalid values", context, in)
		}
	})
}
