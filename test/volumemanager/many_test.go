package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

const (
	manyPods = 200
	// One pod in everyTenth has a volume of the driver.
	everyTenth = 10
)

// TestManyPods adds and removes many pods at once.
func TestManyPods(t *testing.T) {
	m := newMachineWithDriver(t)
	var files, claims []string
	for i := range manyPods {
		name := fmt.Sprintf("pod-%03d", i)
		volumes := []string{
			"{name: config, configMap: {name: settings}}",
			"{name: scratch, emptyDir: {}}",
			"{name: secret, secret: {secretName: keys}}",
			"{name: me, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}",
		}
		if i%everyTenth == 0 {
			volumes[3] = claimed(name)
			claims = append(claims, claim(name, "ext4", "16Mi", ""))
		}
		files = append(files, podOf(name, volumes...))
	}
	m.put("config", settings)
	m.put("claims", claims...)
	m.put("pods", files...)
	for i := range manyPods {
		name := fmt.Sprintf("pod-%03d", i)
		p := m.await(name)
		for volume, want := range map[string]struct{ file, content string }{
			"config": {"greeting", "hello"}, "secret": {"password", "s3cret"}, "me": {"name", name},
		} {
			v, has := p[volume]
			if b, err := os.ReadFile(filepath.Join(v.Path, want.file)); has && string(b) != want.content {
				t.Errorf("volume %s of pod %s: got %q, error %v; want %q", volume, name, b, err, want.content)
			}
		}
		if len(p) != 4 {
			t.Errorf("pod %s: got %d volumes, want 4", name, len(p))
		}
	}
	m.removeAll()
	must(t, m.checkPool(0))
}
