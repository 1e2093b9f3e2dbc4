package main

import (
	"fmt"
	"strings"
)

// podShape is the number of volumes of a pod.
type podShape struct {
	// csi is the number of volumes of the driver, which are images with ext4.
	csi int
	// plain adds a configMap and an emptyDir.
	plain bool
}

// volumes returns the number of volumes of a pod.
func (s podShape) volumes() int {
	if s.plain {
		return s.csi + 2
	}
	return s.csi
}

func (s podShape) String() string {
	if s.plain {
		return fmt.Sprintf("%d csi, 1 configMap, 1 emptyDir", s.csi)
	}
	return fmt.Sprintf("%d csi", s.csi)
}

// podsOf returns the names of n pods and, by name, the manifests of each pod with its claims.
func (s podShape) podsOf(prefix string, n int) (names []string, contents map[string]string) {
	contents = map[string]string{}
	for i := range n {
		name := fmt.Sprintf("%s-%d", prefix, i)
		names = append(names, name)
		contents[name] = s.manifest(name)
	}
	return names, contents
}

// manifest returns the manifests of a pod, its claims and its ConfigMap.
func (s podShape) manifest(name string) string {
	var claims, volumes strings.Builder
	for i := range s.csi {
		claim := fmt.Sprintf("%s-%d", name, i)
		fmt.Fprintf(&claims, "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: %s}\nspec: {storageClassName: bench, accessModes: [ReadWriteOnce], resources: {requests: {storage: %d}}}\n---\n", claim, manySize)
		fmt.Fprintf(&volumes, "  - {name: data-%d, persistentVolumeClaim: {claimName: %s}}\n", i, claim)
	}
	if s.plain {
		claims.WriteString(configMap(name, name) + "---\n")
		fmt.Fprintf(&volumes, "  - {name: config, configMap: {name: %s}}\n  - {name: scratch, emptyDir: {}}\n", name)
	}
	return claims.String() + podManifest(name, volumes.String())
}

// configMap returns the manifest of a ConfigMap with the key content.
func configMap(name, content string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s}\ndata: {content: %q}\n", name, content)
}

// podManifest returns a pod whose UID is its name.
func podManifest(name, volumes string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %[1]s, uid: %[1]s}\nspec:\n  containers: [{name: main, image: none}]\n  volumes:\n%[2]s", name, volumes)
}
