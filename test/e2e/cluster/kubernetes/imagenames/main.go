// Command imagenames prints the full names of images that this version of Kubernetes
// and its end-to-end tests use, one `key name` per line.
package main

import (
	"fmt"

	"k8s.io/kubernetes/test/utils/image"
)

func main() {
	for key, id := range map[string]image.ImageID{
		"agnhost": image.Agnhost,
		"busybox": image.BusyBox,
		"nginx":   image.Nginx,
		"glibc":   image.GlibcDnsTesting,
		"pause":   image.Pause,
	} {
		fmt.Println(key, image.GetE2EImage(id))
	}
}
