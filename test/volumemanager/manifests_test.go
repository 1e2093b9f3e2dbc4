package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestManifests: errors in manifests are reported for each file, object or volume, and do not affect
// other pods.
func TestManifests(t *testing.T) {
	m := newMachineWithDriver(t)
	m.put("config", settings)
	m.put("fine", claim("fine", "ext4", "16Mi", ""), podOf("fine", claimed("fine"), "{name: config, configMap: {name: settings}}", "{name: dir, emptyDir: {}}"))
	p := m.await("fine")
	w := m.watchMounts()
	w.add([]string{p["fine"].Path})

	m.badFiles()
	m.badVolumes()
	m.badClaims()
	m.badSubPath()
	m.subPathHidesKey()
	m.changeImmutable()
	m.editPod(p)
	m.removeDuringOperations()

	m.await("fine")
	must(t, w.end())
	m.removeAll()
	must(t, m.checkPool(0))
}

// badFiles adds files that are invalid as a whole, and files with an invalid and a valid object, whose
// valid objects apply.
func (m *machine) badFiles() {
	parts := map[string]string{
		`"Deployment" is not supported`: "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n",
		"metadata.uid":                  strings.Replace(podOf("evil", "{name: dir, emptyDir: {}}"), "uid: evil", "uid: ../../etc", 1),
		"data[a/b]":                     "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: paths}\ndata: {a/b: c}\n",
		"set one source":                podOf("none", "{name: dir}"),
		"spec.volumes[1].name":          podOf("twice", "{name: dir, emptyDir: {}}", "{name: dir, emptyDir: {}}"),
	}
	messages := map[string]string{} // by the name of the file and of its valid pod
	for message, text := range parts {
		name := fmt.Sprint("bad-", len(messages))
		messages[name] = message
		m.put(name, text, podOf(name, "{name: dir, emptyDir: {}}"))
	}
	for name, message := range messages {
		m.awaitProblem(name, message)
		m.await(name)
		m.remove(name)
	}
	for name := range messages {
		m.awaitRemoved(name)
	}
	m.put("bad", podOf("bad", "{name: dir, emptyDir: {}, oops: 1}"))
	m.awaitProblem("bad", `unknown field "oops"`)
	m.remove("bad")

	fine, err := os.ReadFile(m.manifest("fine"))
	must(m.t, err)
	for i := range 5 { // an editor that writes in place truncates the file
		must(m.t, os.WriteFile(m.manifest("fine"), fine[:(i+1)*len(fine)/7], 0o600))
		m.awaitProblem("fine", "the last valid version of the file applies")
		m.await("fine")
	}
	must(m.t, os.WriteFile(m.manifest("fine"), fine, 0o600))
	m.awaitStatus(func(s volumemanager.Status) error {
		if len(s.Problems) > 0 {
			return fmt.Errorf("got problems %+v, want none", s.Problems)
		}
		return nil
	})
}

// badVolumes adds pods with an invalid and a valid volume each.
func (m *machine) badVolumes() {
	must(m.t, os.Symlink("/nowhere", filepath.Join(m.dir, "dangling")))
	all := map[string]struct {
		volume  string
		phase   state.Phase
		message string
	}{
		"missing-config": {"configMap: {name: none}", state.Failed, "ConfigMap default/none: no manifest has it: add it"},
		"missing-key":    {"configMap: {name: settings, items: [{key: none, path: x}]}", state.Failed, "none"},
		"missing-secret": {"secret: {secretName: none}", state.Failed, "Secret default/none: no manifest has it: add it"},
		"missing-claim":  {"persistentVolumeClaim: {claimName: none}", state.Pending, "add it"},
		"path-out":       {"configMap: {name: settings, items: [{key: greeting, path: ../x}]}", state.Failed, "../x"},
		"no-file":        {fmt.Sprintf("hostPath: {path: %q, type: File}", m.dir), state.Failed, "hostPath"},
		"dangling":       {fmt.Sprintf("hostPath: {path: %q, type: Directory}", m.dir+"/dangling"), state.Failed, "hostPath"},
		"host-up":        {"hostPath: {path: /etc/../etc, type: Directory}", state.Failed, ".."},
		"no-driver":      {"csi: {driver: none.example}", state.Failed, "not registered"},
		"bad-attributes": {"csi: {driver: csi.trivet.dev, volumeAttributes: {size: 16Mi, path: /etc}}", state.Failed, "path"},
		"no-flex":        {"flexVolume: {driver: none/none}", state.Pending, "not installed"},
		"flex-up":        {"flexVolume: {driver: ../../bin}", state.Failed, "flexVolume.driver"},
		"no-such-plugin": {"awsElasticBlockStore: {volumeID: x}", state.Pending, "no volume plugin"},
		"token-up":       {"projected: {sources: [{serviceAccountToken: {path: /token}}]}", state.Failed, "/token"},
	}
	for name, bad := range all {
		m.put(name, podOf(name, fmt.Sprintf("{name: bad, %s}", bad.volume), "{name: good, emptyDir: {}}"))
	}
	for name, bad := range all {
		m.awaitVolume(name, "bad", bad.phase, bad.message)
		m.awaitVolume(name, "good", state.Mounted, "")
		m.remove(name)
	}
	for name := range all {
		m.awaitRemoved(name)
	}
	// The volumes are mounted when the missing objects are added.
	m.put("bad", podOf("waits", "{name: config, configMap: {name: late}}", "{name: data, persistentVolumeClaim: {claimName: late}}"))
	m.awaitVolume("waits", "config", state.Failed, "add it")
	m.put("late", strings.ReplaceAll(settings, "name: settings", "name: late"), claim("late", "directory", "1Mi", ""))
	m.await("waits")
	m.remove("bad")
	m.awaitRemoved("waits")
	m.remove("late")
}

// badClaims adds claims that cannot be bound.
func (m *machine) badClaims() {
	m.put("one", persistent("one", "16Mi", fmt.Sprintf("local: {path: %q}", m.flex)))
	m.put("first", claim("first", `""`, "1Mi", ", volumeName: one"))
	m.awaitClaim("first", "Bound", "")
	m.put("second", claim("second", `""`, "1Mi", ", volumeName: one"), claim("large", `""`, "1Ti", ""), claim("huge", "ext4", "100Ti", ""),
		claim("classless", "none", "1Mi", ""), podOf("stuck", claimed("second"), claimed("large"), claimed("huge"), claimed("classless"), "{name: good, emptyDir: {}}"))
	m.awaitClaim("second", "Pending", "the volume belongs to claim default/first")
	m.awaitClaim("large", "Pending", "is free")
	m.awaitClaim("huge", "Pending", "ResourceExhausted")
	m.awaitClaim("classless", "Pending", `"none"`)
	m.awaitVolume("stuck", "second", state.Pending, "the volume belongs to claim default/first")
	m.awaitVolume("stuck", "good", state.Mounted, "")
	m.remove("first", "second", "one")
	m.awaitRemoved("stuck")
	m.awaitStatus(func(s volumemanager.Status) error {
		if len(s.Claims) != 1 || len(s.PersistentVolumes) != 1 {
			return fmt.Errorf("got claims %+v, PersistentVolumes %+v; want one each", s.Claims, s.PersistentVolumes)
		}
		return nil
	})
}

// awaitClaim waits until a claim has a phase, and a message that contains a text.
func (m *machine) awaitClaim(name, phase, message string) {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, c := range s.Claims {
			if c.Name != name {
				continue
			}
			if c.Phase != phase || !strings.Contains(c.Message, message) {
				return fmt.Errorf("claim %s: got phase %s, message %q; want %s, %q", name, c.Phase, c.Message, phase, message)
			}
			return nil
		}
		return fmt.Errorf("the status has no claim %s", name)
	})
}

// badSubPath changes the subPath of a pod to symbolic links in the volume. Links out of the volume are
// refused.
func (m *machine) badSubPath() {
	with := func(subPath string) string {
		return podWith("linked", fmt.Sprintf(`containers: [{name: main, image: none, volumeMounts: [{name: dir, mountPath: /x, subPath: %q}]}]`, subPath), "{name: dir, emptyDir: {}}")
	}
	m.put("linked", with("first"))
	p := m.await("linked")
	for name, to := range map[string]string{"out": "/etc", "up": "../../../../..", "in": "first"} {
		must(m.t, os.Symlink(to, filepath.Join(p["dir"].Path, name)))
	}
	for _, subPath := range []string{"out", "up/volume-manager", "out/passwd"} {
		m.put("linked", with(subPath))
		m.awaitVolume("linked", "dir", state.Failed, "leads out")
	}
	for _, subPath := range []string{"../x", "/etc"} {
		m.put("linked", with(subPath))
		m.awaitProblem("linked", fmt.Sprintf("%q", subPath))
	}
	m.put("linked", with("in/deeper"))
	p = m.await("linked")
	write(m.t, p["dir"].SubPaths[0].Path)
	wantWritten(m.t, "the target of the link", filepath.Join(p["dir"].Path, "first/deeper"))
	m.remove("linked")
	m.awaitRemoved("linked")
}

// subPathHidesKey adds a key with the name of a directory that a subPath has created in the volume of a
// ConfigMap. All other keys are updated, and after a restart the warning is still reported.
func (m *machine) subPathHidesKey() {
	const late = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: late}\ndata: {%s}\n"
	m.put("late", fmt.Sprintf(late, "a: one"))
	m.put("way", podWith("way", `containers: [{name: main, image: none, volumeMounts: [{name: config, mountPath: /x, subPath: m}]}]`, "{name: config, configMap: {name: late}}"))
	p := m.await("way")
	m.put("late", fmt.Sprintf(late, "a: two, b: two, m: two, z: two"))
	for range 2 {
		m.awaitVolume("way", "config", state.Mounted, `"m" is not the volume's content`)
		for _, key := range []string{"a", "b", "z"} {
			if b, err := os.ReadFile(filepath.Join(p["config"].Path, key)); string(b) != "two" {
				m.t.Errorf("key %s: got %q, error %v; want two", key, b, err)
			}
		}
		m.manager.kill()
		m.startManager()
		m.await("way")
	}
	m.remove("way", "late")
	m.awaitRemoved("way")
}

// changeImmutable changes the data of an immutable ConfigMap. The change is reported and has no effect.
func (m *machine) changeImmutable() {
	const fixed = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: fixed}\nimmutable: true\ndata: {a: %s}\n"
	m.put("fixed", fmt.Sprintf(fixed, "one"), podOf("fixed", "{name: config, configMap: {name: fixed}}"))
	p := m.await("fixed")
	m.put("fixed", fmt.Sprintf(fixed, "two"), podOf("fixed", "{name: config, configMap: {name: fixed}}", "{name: new, emptyDir: {}}"))
	m.awaitProblem("fixed", "immutable: true")
	m.awaitVolume("fixed", "new", state.Mounted, "")
	if b, err := os.ReadFile(filepath.Join(p["config"].Path, "a")); string(b) != "one" {
		m.t.Errorf("volume of an immutable ConfigMap: got %q, error %v; want one", b, err)
	}
	m.remove("fixed")
	m.awaitRemoved("fixed")
}

// editPod changes pod fine and its ConfigMap. Only the changed volumes are changed.
func (m *machine) editPod(p pod) {
	const hello, changed = "greeting: hello", "greeting: changed"
	m.put("config", strings.Replace(settings, hello, changed, 1))
	eventually(m.t, func() error {
		b, err := os.ReadFile(filepath.Join(p["config"].Path, "greeting"))
		if string(b) != "changed" {
			err = fmt.Errorf("key greeting in the volume: got %q, error %v; want changed", b, err) //nolint:errorlint // err may be nil
		}
		return err
	})
	must(m.t, os.WriteFile(filepath.Join(p["dir"].Path, "stays"), nil, 0o600))
	m.put("fine", claim("fine", "ext4", "16Mi", ""), podOf("fine", claimed("fine"), "{name: secret, secret: {secretName: keys}}", "{name: dir, emptyDir: {}}"))
	m.awaitStatus(func(volumemanager.Status) error {
		if _, err := os.Stat(p["config"].Path); !os.IsNotExist(err) {
			return fmt.Errorf("the removed volume config still exists, or Stat failed: %v", err) //nolint:errorlint // err may be nil
		}
		return nil
	})
	p = m.await("fine")
	if _, err := os.Stat(filepath.Join(p["secret"].Path, "password")); err != nil {
		m.t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(p["dir"].Path, "stays")); err != nil {
		m.t.Error(err)
	}
}

// removeDuringOperations removes and adds manifests while operations run.
func (m *machine) removeDuringOperations() {
	for i := range 10 {
		name := fmt.Sprint("short-", i)
		text := []string{claim(name, "ext4", "16Mi", ""), podOf(name, claimed(name), "{name: dir, emptyDir: {}}")}
		m.put(name, text...)
		if i%2 == 0 {
			m.awaitStatus(func(s volumemanager.Status) error {
				for _, v := range s.Volumes {
					if v.Pod == "default/"+name && v.Phase == state.Mounting {
						return nil
					}
				}
				if _, err := os.Stat(filepath.Join(m.root, "pods", name)); err == nil {
					return nil // the volumes were mounted between two reads of the status
				}
				return fmt.Errorf("pod %s: no volume is being mounted yet", name)
			})
		}
		m.remove(name)
		if i%3 == 0 {
			m.put(name, text...)
			m.await(name)
			m.remove(name)
		}
	}
	for i := range 10 {
		m.awaitRemoved(fmt.Sprint("short-", i))
	}
}
