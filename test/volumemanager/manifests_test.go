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

// TestManifests: errors in manifests are reported for each volume, and do not affect other pods.
func TestManifests(t *testing.T) {
	g := newTrivet(t)
	g.put("config", settings)
	g.put("fine", claim("fine", "ext4", "16Mi", ""), podOf("fine", claimed("fine"), "{name: config, configMap: {name: settings}}", "{name: dir, emptyDir: {}}"))
	p := g.await("fine")
	w := g.watchMounts()
	w.add([]string{p["fine"].Path})

	g.badFiles()
	g.badVolumes()
	g.badClaims()
	g.badSubPath()
	g.keyInTheWay()
	g.immutable()
	g.edited(p)
	g.removedAtOnce()

	g.await("fine")
	must(t, w.end())
	g.wantNothing()
	must(t, g.poolHas(0))
}

// badFiles adds files that are invalid as a whole or in part. The valid objects of the latter apply.
func (g *ground) badFiles() {
	parts := map[string]string{
		`"Deployment" is not supported`: "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n",
		"metadata.uid":                  strings.Replace(podOf("evil", "{name: dir, emptyDir: {}}"), "uid: evil", "uid: ../../etc", 1),
		"data[a/b]":                     "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: paths}\ndata: {a/b: c}\n",
		"set one source":                podOf("none", "{name: dir}"),
		"spec.volumes[1].name":          podOf("twice", "{name: dir, emptyDir: {}}", "{name: dir, emptyDir: {}}"),
	}
	names := map[string]string{}
	for message, text := range parts {
		name := fmt.Sprint("bad-", len(names))
		names[name] = message
		g.put(name, text, podOf(name, "{name: dir, emptyDir: {}}"))
	}
	for name, message := range names {
		g.complains(name, message)
		g.await(name)
		g.remove(name)
	}
	for name := range names {
		g.gone(name)
	}
	g.put("bad", podOf("bad", "{name: dir, emptyDir: {}, oops: 1}"))
	g.complains("bad", `unknown field "oops"`)
	g.remove("bad")

	fine, err := os.ReadFile(g.manifest("fine"))
	must(g.t, err)
	for i := range 5 { // like an editor that writes in place
		must(g.t, os.WriteFile(g.manifest("fine"), fine[:(i+1)*len(fine)/7], 0o600))
		g.complains("fine", "the last valid version of the file applies")
		g.await("fine")
	}
	must(g.t, os.WriteFile(g.manifest("fine"), fine, 0o600))
	g.holds(func(s volumemanager.Status) error {
		if len(s.Problems) > 0 {
			return fmt.Errorf("problems: %+v", s.Problems)
		}
		return nil
	})
}

// badVolumes adds pods with an invalid and a valid volume each.
func (g *ground) badVolumes() {
	must(g.t, os.Symlink("/nowhere", filepath.Join(g.dir, "dangling")))
	all := map[string]struct {
		volume  string
		phase   state.Phase
		message string
	}{
		"missing-config": {"configMap: {name: none}", state.Failed, "ConfigMap default/none: no manifest has it: add one"},
		"missing-key":    {"configMap: {name: settings, items: [{key: none, path: x}]}", state.Failed, "none"},
		"missing-secret": {"secret: {secretName: none}", state.Failed, "Secret default/none: no manifest has it: add one"},
		"missing-claim":  {"persistentVolumeClaim: {claimName: none}", state.Pending, "add it"},
		"path-out":       {"configMap: {name: settings, items: [{key: greeting, path: ../x}]}", state.Failed, "../x"},
		"no-file":        {fmt.Sprintf("hostPath: {path: %q, type: File}", g.dir), state.Failed, "hostPath"},
		"dangling":       {fmt.Sprintf("hostPath: {path: %q, type: Directory}", g.dir+"/dangling"), state.Failed, "hostPath"},
		"host-up":        {"hostPath: {path: /etc/../etc, type: Directory}", state.Failed, ".."},
		"no-driver":      {"csi: {driver: none.example}", state.Failed, "not registered"},
		"bad-attributes": {"csi: {driver: csi.trivet.dev, volumeAttributes: {size: 16Mi, path: /etc}}", state.Failed, "path"},
		"no-flex":        {"flexVolume: {driver: none/none}", state.Pending, "not installed"},
		"flex-up":        {"flexVolume: {driver: ../../bin}", state.Failed, "flexVolume.driver"},
		"no-such-plugin": {"awsElasticBlockStore: {volumeID: x}", state.Pending, "no volume plugin"},
		"token-up":       {"projected: {sources: [{serviceAccountToken: {path: /token}}]}", state.Failed, "/token"},
	}
	for name, bad := range all {
		g.put(name, podOf(name, fmt.Sprintf("{name: bad, %s}", bad.volume), "{name: good, emptyDir: {}}"))
	}
	for name, bad := range all {
		g.says(name, "bad", bad.phase, bad.message)
		g.says(name, "good", state.Mounted, "")
		g.remove(name)
	}
	for name := range all {
		g.gone(name)
	}
	// Missing objects are added.
	g.put("bad", podOf("waits", "{name: config, configMap: {name: late}}", "{name: data, persistentVolumeClaim: {claimName: late}}"))
	g.says("waits", "config", state.Failed, "add one")
	g.put("late", strings.ReplaceAll(settings, "name: settings", "name: late"), claim("late", "directory", "1Mi", ""))
	g.await("waits")
	g.remove("bad")
	g.gone("waits")
	g.remove("late")
}

// badClaims adds claims that cannot be bound.
func (g *ground) badClaims() {
	g.put("one", persistent("one", "16Mi", fmt.Sprintf("local: {path: %q}", g.flex)))
	g.put("first", claim("first", `""`, "1Mi", ", volumeName: one"))
	g.claimSays("first", "Bound", "")
	g.put("second", claim("second", `""`, "1Mi", ", volumeName: one"), claim("large", `""`, "1Ti", ""), claim("huge", "ext4", "100Ti", ""),
		claim("classless", "none", "1Mi", ""), podOf("stuck", claimed("second"), claimed("large"), claimed("huge"), claimed("classless"), "{name: good, emptyDir: {}}"))
	g.claimSays("second", "Pending", "it belongs to claim default/first")
	g.claimSays("large", "Pending", "is free")
	g.claimSays("huge", "Pending", "ResourceExhausted")
	g.claimSays("classless", "Pending", `"none"`)
	g.says("stuck", "second", state.Pending, "it belongs to claim default/first")
	g.says("stuck", "good", state.Mounted, "")
	g.remove("first", "second", "one")
	g.gone("stuck")
	g.holds(func(s volumemanager.Status) error {
		if len(s.Claims) != 1 || len(s.PersistentVolumes) != 1 {
			return fmt.Errorf("%+v, %+v", s.Claims, s.PersistentVolumes)
		}
		return nil
	})
}

func (g *ground) claimSays(name, phase, message string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, c := range s.Claims {
			if c.Name != name {
				continue
			}
			if c.Phase != phase || !strings.Contains(c.Message, message) {
				return fmt.Errorf("claim %s is %s with message %q; want %s, %q", name, c.Phase, c.Message, phase, message)
			}
			return nil
		}
		return fmt.Errorf("no claim %s", name)
	})
}

// badSubPath: a subPath contains links that a tenant has created in the volume.
func (g *ground) badSubPath() {
	with := func(subPath string) string {
		return podWith("linked", fmt.Sprintf(`containers: [{name: main, image: none, volumeMounts: [{name: dir, mountPath: /x, subPath: %q}]}]`, subPath), "{name: dir, emptyDir: {}}")
	}
	g.put("linked", with("first"))
	p := g.await("linked")
	for name, to := range map[string]string{"out": "/etc", "up": "../../../../..", "in": "first"} {
		must(g.t, os.Symlink(to, filepath.Join(p["dir"].Path, name)))
	}
	for _, subPath := range []string{"out", "up/volume-manager", "out/passwd"} {
		g.put("linked", with(subPath))
		g.says("linked", "dir", state.Failed, "leads out")
	}
	for _, subPath := range []string{"../x", "/etc"} {
		g.put("linked", with(subPath))
		g.complains("linked", fmt.Sprintf("%q", subPath))
	}
	g.put("linked", with("in/deeper"))
	p = g.await("linked")
	write(g.t, p["dir"].SubPaths[0].Path)
	wantWritten(g.t, "what the link leads to", filepath.Join(p["dir"].Path, "first/deeper"))
	g.remove("linked")
	g.gone("linked")
}

// keyInTheWay: a ConfigMap gets a key with the name of a directory that a subPath has created. All other
// keys are updated, also after a restart.
func (g *ground) keyInTheWay() {
	const late = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: late}\ndata: {%s}\n"
	g.put("late", fmt.Sprintf(late, "a: one"))
	g.put("way", podWith("way", `containers: [{name: main, image: none, volumeMounts: [{name: config, mountPath: /x, subPath: m}]}]`, "{name: config, configMap: {name: late}}"))
	p := g.await("way")
	g.put("late", fmt.Sprintf(late, "a: two, b: two, m: two, z: two"))
	for range 2 {
		g.says("way", "config", state.Mounted, `"m" is not the volume's content`)
		for _, key := range []string{"a", "b", "z"} {
			if b, err := os.ReadFile(filepath.Join(p["config"].Path, key)); string(b) != "two" {
				g.t.Errorf("%s is %q, %v", key, b, err)
			}
		}
		g.manager.kill()
		g.startManager()
		g.await("way")
	}
	g.remove("way", "late")
	g.gone("way")
}

// immutable: immutable objects do not change.
func (g *ground) immutable() {
	const frozen = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: frozen}\nimmutable: true\ndata: {a: %s}\n"
	g.put("frozen", fmt.Sprintf(frozen, "one"), podOf("frozen", "{name: config, configMap: {name: frozen}}"))
	p := g.await("frozen")
	g.put("frozen", fmt.Sprintf(frozen, "two"), podOf("frozen", "{name: config, configMap: {name: frozen}}", "{name: new, emptyDir: {}}"))
	g.complains("frozen", "immutable: true")
	g.says("frozen", "new", state.Mounted, "")
	if b, err := os.ReadFile(filepath.Join(p["config"].Path, "a")); string(b) != "one" {
		g.t.Errorf("what is immutable is %q, %v", b, err)
	}
	g.remove("frozen")
	g.gone("frozen")
}

// edited: a change of a pod or of its objects affects only the changed volumes.
func (g *ground) edited(p pod) {
	const hello, changed = "greeting: hello", "greeting: changed"
	g.put("config", strings.Replace(settings, hello, changed, 1))
	eventually(g.t, func() error {
		b, err := os.ReadFile(filepath.Join(p["config"].Path, "greeting"))
		if string(b) != "changed" {
			err = fmt.Errorf("the ConfigMap has %q: %w", b, err)
		}
		return err
	})
	must(g.t, os.WriteFile(filepath.Join(p["dir"].Path, "stays"), nil, 0o600))
	g.put("fine", claim("fine", "ext4", "16Mi", ""), podOf("fine", claimed("fine"), "{name: secret, secret: {secretName: keys}}", "{name: dir, emptyDir: {}}"))
	g.holds(func(volumemanager.Status) error {
		if _, err := os.Stat(p["config"].Path); !os.IsNotExist(err) {
			return fmt.Errorf("the volume that is not wanted any more: %w", err)
		}
		return nil
	})
	p = g.await("fine")
	if _, err := os.Stat(filepath.Join(p["secret"].Path, "password")); err != nil {
		g.t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(p["dir"].Path, "stays")); err != nil {
		g.t.Error(err)
	}
}

// removedAtOnce removes and adds manifests while operations run.
func (g *ground) removedAtOnce() {
	for i := range 10 {
		name := fmt.Sprint("short-", i)
		text := []string{claim(name, "ext4", "16Mi", ""), podOf(name, claimed(name), "{name: dir, emptyDir: {}}")}
		g.put(name, text...)
		if i%2 == 0 {
			g.holds(func(s volumemanager.Status) error {
				for _, v := range s.Volumes {
					if v.Pod == "default/"+name && v.Phase == state.Mounting {
						return nil
					}
				}
				if _, err := os.Stat(filepath.Join(g.root, "pods", name)); err == nil {
					return nil // it was mounted between two reads of the status
				}
				return fmt.Errorf("pod %s: nothing is done yet", name)
			})
		}
		g.remove(name)
		if i%3 == 0 {
			g.put(name, text...)
			g.await(name)
			g.remove(name)
		}
	}
	for i := range 10 {
		g.gone(fmt.Sprint("short-", i))
	}
}
