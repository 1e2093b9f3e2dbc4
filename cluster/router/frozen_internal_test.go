package router

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenOwners: the file of the owners does not change. In Kubernetes the ConfigMap has the same keys and values.
func TestFrozenOwners(t *testing.T) {
	owners := map[string]string{
		poolKey{name: "ssd", uuid: "0a1b2c3d"}.String(): "node-1.example",
		poolKey{name: "hdd", uuid: "0a1b2c3e"}.String(): "node-2.example",
	}
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	frozen.Format[map[string]string]{
		Dir: "owners",
		Read: func(b []byte) (map[string]string, error) {
			if err := os.WriteFile(filepath.Join(dir, "pool-owners.json"), b, 0o600); err != nil {
				return nil, err
			}
			o, err := OpenOwners(root)
			if err != nil {
				return nil, err
			}
			return o.Known(), nil
		},
		Write: func(owners map[string]string) ([]byte, error) {
			o := &FileOwners{root: root}
			if err := o.Record(t.Context(), owners); err != nil {
				return nil, err
			}
			return os.ReadFile(filepath.Join(dir, "pool-owners.json"))
		},
	}.Test(t, map[string]map[string]string{"pool-owners": owners})
}
