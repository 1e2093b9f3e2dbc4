package pool

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenAttachments: the records of published volumes do not change.
func TestFrozenAttachments(t *testing.T) {
	frozen.Format[Attachment]{
		Dir: "attachments", Read: parseAttachment, Write: func(a Attachment) ([]byte, error) { return json.Marshal(a) },
	}.Test(t, map[string]Attachment{
		"read-write": {Version: 1, Node: "node-1.example"},
		"read-only":  {Version: 1, Node: "node-1.example", ReadOnly: true},
	})
	for multi, want := range map[bool]string{false: "node", true: "node.77e79d7c5dd65503"} {
		if got := (Attachment{Node: "node-1.example", MultiNode: multi}).file(); got != want {
			t.Errorf("multi-node %t: got file %s, want %s", multi, got, want)
		}
	}
}

// TestFrozenMarker: pool.json does not change.
func TestFrozenMarker(t *testing.T) {
	frozen.Format[marker]{
		Dir: "markers",
		Read: func(b []byte) (marker, error) {
			root, err := os.OpenRoot(t.TempDir())
			if err != nil {
				return marker{}, err
			}
			defer root.Close()
			if err := atomicfile.Write(root, markerFile, b); err != nil {
				return marker{}, err
			}
			return readMarker(root, "the test's directory")
		},
		Write: func(m marker) ([]byte, error) { return m.encode(), nil },
	}.Test(t, map[string]marker{"pool": {Version: 1, UUID: "0a1b2c3d-0123-4567-89ab-0123456789ab", Name: "ssd"}})
}

// TestFrozenFiles: the files of a pool keep their paths below the pool, and those of a node below the state directory.
func TestFrozenFiles(t *testing.T) {
	frozen.List(t, "files", []string{
		markerFile, lockFile, tmpDir, trashDir, archivedDir, retainedDir,
		volumePath("NAME", recordFile), volumePath("NAME", ImageFile), volumePath("NAME", DataDir),
		volumePath("NAME", string(Formatting)), volumePath("NAME", string(Formatted)), volumePath("NAME", string(Cloned)), volumePath("NAME", receivedFile), volumePath("NAME", contentFile), volumePath("NAME", trimmedFile), volumePath("NAME", checkedFile),
		volumesDir + "/" + attachedPath("NAME", singleFile),
		snapshotsDir + "/NAME/" + snapshotFile,
		tmpDir + "/ENTRY/" + placingFile, trashDir + "/ENTRY/" + quotaFile,
		"STATE/" + knownDir,
	})
}
