package volumemanager

import (
	"fmt"
	"strings"
)

// trivet is the CSIDriver of this project's driver.
const trivet = `
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: csi.trivet.dev}
spec: {attachRequired: true, podInfoOnMount: true, fsGroupPolicy: File, volumeLifecycleModes: [Persistent, Ephemeral]}
---
`

// classes are the StorageClasses of this project's driver.
const classes = trivet + `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: ext4}
provisioner: csi.trivet.dev
parameters: {backend: loop, csi.storage.k8s.io/fstype: ext4}
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: xfs}
provisioner: csi.trivet.dev
parameters: {backend: loop, csi.storage.k8s.io/fstype: xfs}
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: btrfs}
provisioner: csi.trivet.dev
parameters: {backend: loop, csi.storage.k8s.io/fstype: btrfs}
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: late}
provisioner: csi.trivet.dev
parameters: {backend: loop}
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: kept}
provisioner: csi.trivet.dev
parameters: {backend: loop}
reclaimPolicy: Retain
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: directory}
provisioner: csi.trivet.dev
parameters: {backend: local}
allowVolumeExpansion: true
`

// passphraseSecret is the Secret of encrypted volumes, and encrypted the parameters of their classes.
const (
	passphraseSecret = `
apiVersion: v1
kind: Secret
metadata: {name: passphrase}
stringData: {passphrase: a passphrase in a manifest}
`
	encrypted = ", encryption: luks2" +
		", csi.storage.k8s.io/node-stage-secret-name: passphrase, csi.storage.k8s.io/node-stage-secret-namespace: default" +
		", csi.storage.k8s.io/node-expand-secret-name: passphrase, csi.storage.k8s.io/node-expand-secret-namespace: default"
)

// class returns the manifest of a StorageClass of this project's driver.
func class(name, parameters string) string {
	return fmt.Sprintf(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: %s}
provisioner: csi.trivet.dev
parameters: {%s}
allowVolumeExpansion: true
`, name, parameters)
}

// claim returns the manifest of a claim. more contains additional fields of the claim's spec, each
// preceded by a comma.
func claim(name, class, size, more string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %[1]s, uid: %[1]s}
spec: {storageClassName: %[2]s, accessModes: [ReadWriteOnce], resources: {requests: {storage: %[3]s}}%[4]s}
`, name, class, size, more)
}

// persistent returns the manifest of a PersistentVolume without a class.
func persistent(name, size, spec string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: %s}
spec: {accessModes: [ReadWriteOnce], storageClassName: "", capacity: {storage: %s}, %s}
`, name, size, spec)
}

// podOf returns the manifest of a pod whose UID is its name, with volumes and a container without mounts.
func podOf(name string, volumes ...string) string {
	return podWith(name, "containers: [{name: main, image: none}]", volumes...)
}

// podWith is like podOf, but spec contains the fields of the pod's spec other than the volumes.
func podWith(name, spec string, volumes ...string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, uid: %[1]s, labels: {app: web}}
spec:
  %[2]s
  volumes:
  - %[3]s
`, name, spec, strings.Join(volumes, "\n  - "))
}

// claimed returns a volume of a pod for a claim of the same name.
func claimed(name string) string {
	return fmt.Sprintf("{name: %[1]s, persistentVolumeClaim: {claimName: %[1]s}}", name)
}

// settings contains the ConfigMap settings and the Secret keys.
const settings = `
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {greeting: hello, other: world}
---
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {password: s3cret}
`
